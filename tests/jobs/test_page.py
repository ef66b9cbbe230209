"""Tests the page of a run: what it shows, in which order, and that it needs nothing beside itself."""

import json
import re
import shlex
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from inline_run import train_inline
from own_model import WORDS
from processes import command, succeeded

from gpipe_cli.jobs.page import PAGE, PLAN, run_page, write_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), "")
MEASURE = "<script>document.body.title = document.documentElement.scrollWidth + ' of ' + innerWidth</script>"
ORDER = ["Did it work", "Where did the time go", "What would make it faster", "What it was"]


class Page(HTMLParser):
    """Reads titles, texts, pictures and addresses of a page, and whether its elements are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.addresses, self.texts, self._open = list[str](), list[str](), list[str](), list[str]()
        self.sections, self.pictures = list[str](), list[str | None]()
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.tags.append(tag)
        self.addresses += [value for key, value in attributes if key in ("src", "href", "xlink:href") and value]
        self.pictures += [found.get("aria-label" if tag == "svg" else "alt")] * (tag in ("svg", "img"))
        self._open += [tag] * (tag not in ("meta", "img"))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        self.sections += [data] * (self._open[-1:] == ["h2"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_command_on_the_page_of_a_run_runs(tmp_path: Path) -> None:
    """... of a run with a folder of configurations and code of the user's own, and a schedule with a length."""
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text("_target_: own_layers.layers\n")
    shutil.copy(Path(__file__).parents[1] / "helpers" / "own_model.py", tmp_path / "own_layers.py")
    words = ["--config-dir", "conf", "model=mine", *(word for word in WORDS if not word.startswith(("model", "lr_")))]
    words += [
        "lr_schedule=cosine",
        "lr_schedule.warmup_steps=1",
        "trainer.steps=2",
        "hydra.run.dir=run",
        "pipeline.K=2",
    ]
    succeeded(command("train", *words, "pipeline.workers=1", cwd=tmp_path))
    shown = re.findall(r"<pre>(.*?)</pre>", (tmp_path / "run" / PAGE).read_text(), re.DOTALL)
    lines = [shlex.split(line) for block in shown for line in unescape(block).splitlines()]
    assert [name for name, *_ in lines] == ["gpipe-report", "gpipe-train", "gpipe-train", "gpipe-eval", "gpipe-export"]
    for name, *typed in lines[2:]:
        succeeded(command(name.removeprefix("gpipe-"), *typed, cwd=tmp_path))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a little; returns the run directory with the configuration that a command leaves."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ["debug=tiny", "pipeline.K=3", "trainer.trace_steps=3"]
    train_inline(folder, *words)
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(words))
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump({"pipeline": {"K": 3}, "trainer": {"steps": 4}}))
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_the_questions_are_answered_in_order_by_one_file_that_loads_nothing(run: Path) -> None:
    text = run_page(run).html()
    found = Page(text)
    assert found.sections == ORDER
    assert all(address.startswith("data:") for address in found.addresses)
    assert "script" not in found.tags and "://" not in text
    assert found.pictures and all(found.pictures)
    assert len(text) < 1_000_000


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="needs chromium")
@pytest.mark.parametrize("width", [500, 1280])
def test_a_browser_shows_the_page_without_errors_and_without_cutting_it_off(run: Path, width: int) -> None:
    file = run / PAGE
    text = run_page(run).html().replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    file.write_text(text + MEASURE)
    words = ["--headless=new", "--no-sandbox", "--enable-logging=stderr", f"--window-size={width},900", "--dump-dom"]
    command, home = [BROWSER, *words, file.as_uri()], {"HOME": str(run)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100, env=home)
    assert "CONSOLE" not in done.stderr
    found = re.search(r'title="(\d+) of (\d+)"', done.stdout)
    assert found and int(found[1]) <= int(found[2]) <= width


def test_the_page_has_the_traced_step_the_loss_samples_cells_and_commands(run: Path) -> None:
    found = Page(run_page(run).html())
    said = "\n".join(found.texts)
    assert [alt for alt in found.pictures if alt and "step 3 as measured: K = 3, M = 4" in alt and "planned" in alt]
    assert {"Loss over the steps", "reference", "forward ms", "memory used", "perplexity"} <= set(found.texts)
    assert [alt for alt in found.pictures if alt and "Where a step goes; measured: computation" in alt]
    assert "gpipe-train debug=tiny pipeline.K=3 trainer.trace_steps=3" in said and "hydra.run.dir=" in said
    assert "checkpoint.resume=auto trainer.steps=8" in said


def test_what_the_planner_found_stands_there_as_words_to_type(run: Path) -> None:
    rival = {"keys": {"pipeline.K": 4}, "step_seconds": 0.6, "memory": 1e6, "fits": True}
    own = {"step_seconds": 1.0, "bubble": 0.25, "devices": [{"total": 2e6}]}
    best = {"step_seconds": 0.5, "memory": 1e6, "tried": 9, "found": {"pipeline.K": 2, "pipeline.M": 8}}
    (run / PLAN).write_text(json.dumps({"own": own, "best": {**best, "rivals": [rival]}}))
    said = "\n".join(Page(run_page(run).html()).texts)
    assert "It saves 50.0 % of a step, as planned (1 s now, 500 ms), to type:" in said
    assert "gpipe-train debug=tiny trainer.trace_steps=3 pipeline.K=2 pipeline.M=8" in said
    assert "2 MB" in said and "slower" in said and "K=4" in said


def test_a_run_that_continues_another_does_not_show_its_end(run: Path) -> None:
    texts = Page(run_page(run, running=True).html()).texts
    assert "running" in texts and "done" not in texts


def test_a_run_without_any_finite_loss_has_its_picture_too(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n')
    assert "Loss over the steps" in Page(run_page(tmp_path).html()).texts


def test_a_long_run_is_drawn_from_few_of_its_rows(tmp_path: Path) -> None:
    rows = (f'{{"step": {step}, "loss": {1 + 1 / step}}}\n' for step in range(1, 100_001))
    (tmp_path / "metrics.jsonl").write_text("".join(rows))
    text = run_page(tmp_path, running=True).html()
    assert len(text) < 80_000 and "80,000" in text and "2 → 1" in text and "100,000" in Page(text).texts


def test_an_empty_directory_has_a_page_too(tmp_path: Path) -> None:
    assert Page(run_page(tmp_path).html()).sections == ORDER


def test_what_comes_from_files_is_only_text(run: Path) -> None:
    hostile = {"step": 9, "nll": 1.0, "samples": [{"language": "<script>alert(1)</script>"}]}
    with (run / "evaluations.jsonl").open("a") as file:
        file.write(json.dumps(hostile) + "\n")
    for picture in (run / "pictures").iterdir():
        picture.write_text('<svg onload="x()" aria-label="A step"><script>alert(2)</script></svg>')
    found = Page(run_page(run).html())
    assert "A step" in found.pictures and "alert(2)" not in found.texts
    assert "script" not in found.tags and "<script>alert(1)</script>" in found.texts


def test_damaged_files_do_not_cost_the_page(run: Path) -> None:
    (run / PLAN).write_text('{"own": []}')
    with (run / "evaluations.jsonl").open("a") as file:
        file.write("[[\n")
    found = Page(run_page(run).html())
    assert found.sections == ORDER and "To let the planner search, type:" in found.texts
    assert any("evaluations.jsonl: damaged and skipped: line " in text for text in found.texts)


def test_a_page_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / PAGE).mkdir()
    told: list[str] = []
    write_page(tmp_path, told.append)
    assert len(told) == 1 and "report.html is not written" in told[0]
