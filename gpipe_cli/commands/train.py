"""gpipe-train: trains a list of layers that is cut into K cells, each on a worker of its own, with every
mini-batch split into M micro-batches (GPipe). The result is the same for every K.

    gpipe-train model=transformer pipeline.K=16             the main job: 102 languages into English, embedded data
    gpipe-train -m pipeline.K=1,2,4 pipeline.M=4,8,16       a sweep: nine runs, one table at the end
    gpipe-train debug=tiny                                  the same code in seconds
    gpipe-train model=transformer_lm_small data=text data.root=FOLDER      a language model of your own text
    gpipe-train model=module model.module._target_=NAME     any nn.Module: NAME makes it, as torchvision.models.vgg11
    gpipe-train model._target_=my_module.my_layers          your own list of layers, from ./my_module.py

Keys (key=value) and the defaults of model=transformer:
    pipeline.K              4            cells that the model is cut into
    pipeline.M              4            micro-batches in a mini-batch
    pipeline.remat          except_last  recompute each forward before its backward: always, except_last, never
    pipeline.schedule       gpipe        gpipe, 1f1b, interleaved_1f1b, breadth_first, zero_bubble, or a file
    pipeline.workers        auto         processes; auto: one for each cell, up to the number of devices
    pipeline.replicas       1            copies of the whole pipeline
    data.batch_size         96           examples in a mini-batch, over all replicas
    trainer.steps           1100         mini-batches to train on
    trainer.evaluate_every  550          steps between evaluations
    optimizer.lr            0.005        peak learning rate
    checkpoint.every        500          steps between checkpoints
    checkpoint.resume       null         auto, or the path of a run to resume
    launch.restarts         0            restarts after a worker's death
    seed                    1            seed of weights, dropout and data order

Groups (group=option; * is the default, unless the model chooses another):
    model       amoebanet  custom  module  transformer*  transformer_lm  transformer_lm_small
    data        birdsnap  cifar10  cifar100  cldr*  cldr_text  cldr_text_paper  custom  digits  fgvc_aircraft
                food101  image_folder  imagenet  oxford_pets  parallel_text  stanford_cars  text
    task        classification  custom  language_model  own_loss  translation*
    optimizer   adafactor  adafactor_momentum  adam*  adamw  custom  muon  muon_tables  rmsprop  rmsprop_tf  sgd
    lr_schedule constant*  cosine  cosine_warmup_20  custom  exponential  exponential_epochs  inverse_sqrt
                linear_warmup  step  transformer
    pipeline    auto  default*  laptop
    precision   bf16  fp16  fp32*
    experiment  imagenet/amoebanet_b_18_512  imagenet/amoebanet_d_google  nmt/bilingual  nmt/large_batch
                nmt/t_12_16384_32  nmt/t_24_8192_16  nmt/t_32_16384_32  nmt/t_64_16384_32  nmt/t_6_8192_16
                nmt_small/bilingual  nmt_small/deep  nmt_small/messages  nmt_small/narrow  nmt_small/very_deep
                nmt_small/wide
                transfer/birdsnap  transfer/cifar10  transfer/cifar100  transfer/fgvc_aircraft
                transfer/food101  transfer/oxford_pets  transfer/stanford_cars
    debug       tiny

-m runs a sweep, --cfg job prints the whole configuration, --config-dir DIR adds YAML files of your own.
Every key with its meaning: the YAML files in conf/. More: README.md and docs/.
Also: gpipe-plan (before a run), gpipe-verify, -eval, -translate, -generate, -predict, -report, -bench and -export.
"""  # --help prints this

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpipe_cli.terminal.command import ANSWERED_BY_HYDRA, OF_HYDRA, read_words, run_command, to_stderr
from gpipe_cli.terminal.text import command_name

if TYPE_CHECKING:
    from gpipe_cli.jobs.job import EntryPoint


def main(arguments: Sequence[str] | None = None, program: EntryPoint | None = None, page: str = __doc__) -> int:
    """Runs the command; --help, --version and unknown options are answered before Hydra is imported.

    Args:
        arguments: the words of the command line; None: those of this process.
        program: the entry point of the workers; None: the trainer.
        page: text of --help.

    Returns:
        The exit code: 0; 1 when a run failed; 2 when its configuration was refused; 130 after Ctrl-C.
    """
    return run_command(command_name(), arguments, page, partial(_run, program=program), say=_say)


def _say(text: str) -> None:
    from gpipe_cli.jobs.torchrun import HEAD_START, is_first

    if is_first():
        to_stderr(text)
    else:
        time.sleep(HEAD_START)


def _run(words: Sequence[str], program: EntryPoint | None) -> int:
    line = read_words(words, options=OF_HYDRA, runs=False)
    from gpipe_cli.jobs import job, sweep, torchrun

    started_at = time.monotonic() - time.process_time()  # Python's start and the imports so far are CPU time
    program = program or job.EntryPoint()
    with torchrun.own_places(line.overrides) as places:
        if line.has(*ANSWERED_BY_HYDRA):
            sweep.ask_hydra(line, program, places, lambda _: None)
            return 0
        if line.has("-m", "--multirun") or "hydra.mode=MULTIRUN" in line.overrides:
            return sweep.run_sweep(line, program, places)
        return job.run_once(line, program, started_at, places)


if __name__ == "__main__":
    sys.exit(main())
