"""Fine-tunes a language model of the transformers library on a text, with a loop of one's own.

    torchrun --nproc-per-node 2 examples/fine_tuning.py [MODEL]

MODEL is a name or a folder for `from_pretrained`, as gpt2; without it a small GPT-2 learns bytes from random weights.
"""

import sys

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from gpipe_cli import Pipeline

TEXT = "A pipeline divides a model among workers, and a mini-batch among the workers' steps. " * 40
LENGTH, SIZE, STEPS = 16, 8, 8  # of a sequence; of a mini-batch; number of steps


def model_and_tokens(name: str | None) -> tuple[PreTrainedModel, Tensor]:
    """Returns the model, the same on every worker, and the text as its tokens."""
    if name is not None:
        tokens = AutoTokenizer.from_pretrained(name)(TEXT).input_ids
        return AutoModelForCausalLM.from_pretrained(name, use_cache=False).train(), torch.tensor(tokens)
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**sizes, use_cache=False, bos_token_id=None, eos_token_id=None)
    return GPT2LMHeadModel(config), torch.tensor([*TEXT.encode()])


def mini_batch(tokens: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Returns sequences of the text, and for each place the token that follows."""
    starts = torch.randint(0, len(tokens) - LENGTH, (SIZE,), generator=torch.Generator().manual_seed(number))
    rows = torch.stack([tokens[start : start + LENGTH + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def loss_of(outputs: CausalLMOutput, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


def main() -> None:
    model, tokens = model_and_tokens(sys.argv[1] if len(sys.argv) > 1 else None)
    pipeline = Pipeline.of(model, loss_of, mini_batch(tokens, 0), K=2, M=4, schedule="1f1b")
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.003)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for number in range(STEPS):
        losses = [pipeline.step(*mini_batch(tokens, 2 * number + half)) for half in range(2)]  # their gradients add up
        norm = pipeline.clip_grad_norm_(2.0)
        optimizer.step()
        schedule.step()
        pipeline.zero_grad()
        if pipeline.world.rank == 0:
            print(f"step {number + 1}  loss {sum(losses) / 2:.4f}  gradient norm {norm:.3f}")
    pipeline.save("checkpoints", optimizer, extra=schedule.state_dict())  # pipeline.load(…) continues, at any K
    pipeline.write_back(model)  # every process has trained its own part
    if pipeline.world.rank == 0:
        model.save_pretrained("tuned")


if __name__ == "__main__":
    main()
