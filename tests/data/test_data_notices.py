"""Tests that a data source's warnings are shown on the console and its counts are in the summary."""

from __future__ import annotations

from pathlib import Path

import tiny_images
from inline_run import train_inline


def test_a_broken_image_is_named_on_the_console_and_counted_in_the_summary(tmp_path: Path) -> None:
    tiny_images.image_folder(tmp_path / "data")
    spoilt = tmp_path / "data" / "train" / "n00000001" / "n00000001_0.JPEG"
    spoilt.write_bytes(b"not an image")
    words = ["debug=tiny", "model=amoebanet", "model.L=3", "data=image_folder", f"data.root={tmp_path / 'data'}"]
    words += ["data.classes=3", "data.batch_size=8", "data.workers=0", "data.broken_images_limit=2", "trainer.steps=2"]
    summary, events = train_inline(tmp_path / "run", *words)
    warnings = [event["text"] for event in events if event["kind"] == "warning"]
    assert any(str(spoilt) in text and "1 of at most 2" in text for text in warnings)
    assert summary["data_defects"] == {"broken_images": 1}
