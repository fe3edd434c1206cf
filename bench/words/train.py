"""Trains the model that prfaas ships as `trained: words`: a tiny Qwen3-Next that writes like Python's documentation.

Matrices learn by Muon, the rest by AdamW. The learning rate is held and then falls to zero in the last part of the
minutes. More and more windows are of the topics of `help()`, which the demo's prompts are passages of.

    python bench/words/corpus.py /usr/share/doc/python3.11/html /tmp/words
    python bench/words/train.py run /tmp/words --minutes 60      # goes on where it was stopped; writes /tmp/words/words
    python bench/words/train.py write /tmp/words                 # a checkpoint of what has been learnt so far
    python bench/words/train.py judge /tmp/words                 # losses, and what it writes; by Hugging Face's forward
    python bench/words/train.py check                            # this forward pass and Hugging Face's, random weights
"""

import argparse
import math
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from model import CHUNK_TOKENS, END_ID, VOCAB_SIZE, Words, write_checkpoint
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

from prfaas.serving.engines.tiny.configs import SPECIAL_TOKENS

SEED = 31
STEP_TOKENS = 4096
WINDOW_TOKENS = 1024

# From these shares of the minutes on, so many windows are of the topics; in the last part the learning rate falls.
TOPICS_SHARES = ((0.0, 0.0), (0.15, 0.5), (0.6, 0.75))
DECAY_FROM = 0.6

MUON_LR, ADAM_LR, WEIGHT_DECAY, WARMUP_STEPS = 0.02, 4e-3, 0.1, 50
BALANCE = 0.01

_SAVE_EVERY_S = 180.0
_HELD_OUT_STEPS = 4
_JUDGED_TOKENS = 40_960
_EOS_TEXT = "</s>"


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """A byte-level BPE tokenizer learnt from `texts`, with the tiny models' special tokens as its first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


# --- learning -------------------------------------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Momentum whose steps are made orthogonal (Jordan et al., 2024); torch's own goes matrix by matrix, 140 here.

    Matrices of one shape are stacked, so that five rounds of three products serve all of them.
    """

    def __init__(self, matrices: Sequence[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for weight in group["params"]:
                shapes.setdefault(weight.shape, []).append(weight)
            for shape, weights in shapes.items():
                grads = torch.stack([weight.grad for weight in weights if weight.grad is not None])
                state = self.state[weights[0]]
                momentum = state.setdefault("momentum", torch.zeros_like(grads))
                momentum.lerp_(grads, 1 - group["momentum"])
                step = orthogonal(grads.lerp(momentum, group["momentum"]))
                scale = math.sqrt(max(1.0, shape[0] / shape[1]))
                for weight, change in zip(weights, step, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(
                        change, alpha=-group["lr"] * scale
                    )


def orthogonal(stack: Tensor) -> Tensor:
    """(count, rows, columns), each with its singular values brought near 1 by a Newton-Schulz iteration of order 5."""
    x = stack.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    near: Tensor = (x.mT if tall else x).float()
    return near


def optimizers(model: Words) -> tuple[Muon, torch.optim.AdamW]:
    """Muon for the matrices inside layers, AdamW for all else."""
    inner, outer, small = [], [], []
    for name, weight in model.named_parameters():
        if "embed" in name or "lm_head" in name:
            outer.append(weight)
        elif weight.ndim != 2 or min(weight.shape) < 64:
            small.append(weight)
        else:
            inner.append(weight)
    adam = torch.optim.AdamW(
        [{"params": outer, "weight_decay": WEIGHT_DECAY}, {"params": small, "weight_decay": 0.0}],
        lr=ADAM_LR,
        betas=(0.9, 0.95),
        fused=True,
    )
    return Muon(inner, MUON_LR, WEIGHT_DECAY), adam


def windows(ids: Tensor, position: int, window: int, count: int) -> Tensor:
    """`count` windows (count, window + 1) of `ids` at `position`, the number of tokens learnt from before.

    In each pass over the text the windows begin elsewhere and come in another order.
    """
    passes, inside = divmod(position, len(ids))
    draw = torch.Generator().manual_seed(SEED * 1000 + passes)
    offset = int(torch.randint(window, (), generator=draw))
    order = torch.randperm((len(ids) - 1 - offset) // window, generator=draw)
    first = inside // window
    rows = [order[(first + i) % len(order)] * window + offset for i in range(count)]
    return torch.stack([ids[row : row + window + 1] for row in rows])


@dataclass
class Progress:
    """How far training is; saved with the weights."""

    step: int = 0
    tokens: int = 0
    """Of the whole text; those of the topics beside it are counted apart."""
    topics_tokens: int = 0
    elapsed_s: float = 0.0


class Run:
    """A training that can be stopped and goes on."""

    def __init__(self, folder: Path, minutes: float) -> None:
        torch.manual_seed(SEED)
        self._folder = folder
        self._minutes = minutes
        self.tokenizer = tokenizer_of(folder)
        self._learnt, self._topics, self._held_out = (
            token_ids(folder, self.tokenizer, part) for part in ("train", "topics", "held-out")
        )
        self.model = Words()
        self._muon, self._adam = optimizers(self.model)
        self.progress = Progress()
        self._stopped = False
        if (folder / "state.pt").exists():
            self._load()

    def _load(self) -> None:
        state = torch.load(self._folder / "state.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self._muon.load_state_dict(state["muon"])
        self._adam.load_state_dict(state["adam"])
        self.progress = Progress(**state["progress"])

    def save(self) -> None:
        """Everything that going on needs, whole or not at all."""
        draft = self._folder / "state.draft"
        state = {
            "model": self.model.state_dict(),
            "muon": self._muon.state_dict(),
            "adam": self._adam.state_dict(),
            "progress": vars(self.progress),
        }
        torch.save(state, draft)
        draft.rename(self._folder / "state.pt")

    def stop(self, _signal: int, _frame: FrameType | None) -> None:
        """Ends the training after this step, with its state saved."""
        self._stopped = True

    def compile(self) -> None:
        """Makes machine code of the layers: minutes once for each window, and faster steps from then on."""
        for layer in self.model.model.layers:
            layer.compile(dynamic=False)
        self.model.head_loss = torch.compile(self.model.head_loss, dynamic=False)  # type: ignore[method-assign]

    def learn(self) -> None:
        """Trains until the minutes are over or a signal comes."""
        saved, loss_mean, began = time.monotonic(), 0.0, time.monotonic()
        recent: list[float] = []
        while (share := self.progress.elapsed_s / 60 / self._minutes) < 1 and not self._stopped:
            loss = self._step(share)
            recent.append(loss)
            now = time.monotonic()
            self.progress.elapsed_s += now - began
            seconds, began = now - began, now
            if self.progress.step % 20 == 0:
                loss_mean = sum(recent[-50:]) / len(recent[-50:])
                self._report(share, loss_mean, STEP_TOKENS / seconds)
            if now - saved > _SAVE_EVERY_S:
                self.save()
                print(f"held out {self.held_out():.3f}", flush=True)
                saved = began = time.monotonic()
        self.save()

    def _step(self, share: float) -> float:
        rate = min(1.0, (self.progress.step + 1) / WARMUP_STEPS, (1 - share) / (1 - DECAY_FROM))
        for optimizer, lr in ((self._muon, MUON_LR), (self._adam, ADAM_LR)):
            for group in optimizer.param_groups:
                group["lr"] = lr * rate
        loss, uneven = self.model.losses(
            self._next_windows([of_topics for begin, of_topics in TOPICS_SHARES if share >= begin][-1])
        )
        self._muon.zero_grad()
        self._adam.zero_grad()
        (loss + BALANCE * uneven).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._muon.step()
        self._adam.step()
        self.progress.step += 1
        return float(loss.detach())

    def _next_windows(self, topics_share: float) -> Tensor:
        window, count = WINDOW_TOKENS, STEP_TOKENS // WINDOW_TOKENS
        of_topics = min(round(count * topics_share), count - 1)
        rows = windows(self._learnt, self.progress.tokens, window, count - of_topics)
        self.progress.tokens += (count - of_topics) * window
        if of_topics:
            more = windows(self._topics, self.progress.topics_tokens, window, of_topics)
            self.progress.topics_tokens += of_topics * window
            rows = torch.cat([rows, more])
        return rows

    def _report(self, share: float, loss: float, tokens_per_s: float) -> None:
        passes = self.progress.tokens / len(self._learnt)
        print(
            f"step {self.progress.step}, {self.progress.elapsed_s:.0f} s, {share:.1%} of the minutes,"
            f" {passes:.2f} passes, loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s",
            flush=True,
        )

    def held_out(self) -> float:
        """Nats per token on the beginning of the held-out text, in steps of the shape that training has compiled."""
        count, window = STEP_TOKENS // WINDOW_TOKENS, WINDOW_TOKENS
        starts = range(0, _HELD_OUT_STEPS * STEP_TOKENS, window)
        rows = torch.stack([self._held_out[start : start + window + 1] for start in starts])
        losses = [float(self.model.losses(part)[0].detach()) for part in torch.split(rows, count)]
        return sum(losses) / len(losses)


def tokenizer_of(folder: Path) -> Tokenizer:
    """The folder's tokenizer, learnt from its text first if it is not there."""
    path = folder / "tokenizer.json"
    if not path.exists():
        train_tokenizer((folder / "train.txt").read_text().split(_EOS_TEXT)).save(str(path), pretty=False)
    return Tokenizer.from_file(str(path))


def token_ids(folder: Path, tokenizer: Tokenizer, part: str) -> Tensor:
    """The ids of the folder's text `part`, kept beside it."""
    path = folder / f"{part}.pt"
    if not path.exists():
        texts = (folder / f"{part}.txt").read_text().split(_EOS_TEXT)
        ids = [id_ for text in texts if text for id_ in [*tokenizer.encode(text).ids, END_ID]]
        torch.save(torch.tensor(ids), path)
    ids_tensor: Tensor = torch.load(path, weights_only=True)
    return ids_tensor


# --- judging --------------------------------------------------------------------------------------------------------


def hugging_face(folder: Path) -> Any:
    """The checkpoint in Hugging Face's own code, in fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()


def spread_windows(ids: Tensor, window: int) -> Tensor:
    """(count, window + 1): `_JUDGED_TOKENS` tokens of `ids`, spread evenly, or all if there are fewer."""
    count = min(_JUDGED_TOKENS, len(ids) - 1) // window
    starts = torch.linspace(0, len(ids) - 1 - window, count).long().tolist()
    return torch.stack([ids[start : start + window + 1] for start in starts])


@torch.no_grad()
def reference_loss(model: Any, rows: Tensor) -> float:
    """Nats per token by Hugging Face's forward pass."""
    losses = [functional.cross_entropy(model(input_ids=row[None, :-1]).logits[0], row[1:]) for row in rows]
    return float(torch.stack(losses).mean())


def judge(folder: Path, out: Path) -> None:
    """Prints losses of the checkpoint `out` on both texts of `folder`, and what it writes after the demo's prompts."""
    from prfaas.tools.demo.prompts import demo_prompts

    model, tokenizer = hugging_face(out), Tokenizer.from_file(str(out / "tokenizer.json"))
    for part in ("topics", "train", "held-out"):
        ids = token_ids(folder, tokenizer, part)
        for window in (512, 4096):
            rows = spread_windows(ids, window)
            nats = reference_loss(model, rows)
            bytes_per_token = (
                len(tokenizer.decode(rows.flatten().tolist(), skip_special_tokens=False)) / rows.numel()
            )
            bits = nats / math.log(2) / bytes_per_token
            print(
                f"{part}, windows of {window}: {nats:.2f} nats a token of {bytes_per_token:.2f} bytes, {bits:.2f} bits"
                " a byte",
                flush=True,
            )
    for prompt in demo_prompts(chars_per_token=3.6):
        ids = torch.tensor([tokenizer.encode(prompt.text).ids])
        answer = model.generate(ids, max_new_tokens=64, do_sample=False)[0, ids.shape[1] :]
        print(f"--- {prompt.label}, {ids.shape[1]} tokens: ...{prompt.text[-160:]}")
        print(f">>> {tokenizer.decode(answer.tolist())}", flush=True)


def check() -> None:
    """Compares this file's forward pass with Hugging Face's: random weights, fp64 products, the same logits."""
    import tempfile

    torch.manual_seed(SEED)
    model = Words()
    ids = torch.randint(VOCAB_SIZE, (2, 3 * CHUNK_TOKENS))
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(model, train_tokenizer(["a b"]), Path(folder))
        reference = hugging_face(Path(folder))
    model.load_state_dict({name: weight.bfloat16() for name, weight in model.state_dict().items()})
    with torch.no_grad():
        wanted, got = reference.double()(input_ids=ids).logits, model.double().logits(ids)
    error = float((wanted - got).abs().max() / wanted.std())
    print(f"largest difference of logits: {error:.1e} of their standard deviation")
    if error > 1e-5:
        raise SystemExit("the forward passes differ")


def main() -> None:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["run", "write", "judge", "check"])
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path(), help="what corpus.py wrote; state is kept here"
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="of training in all, resumed ones counted (%(default)s)"
    )
    parser.add_argument("--threads", type=int, default=2, help="of the processor (%(default)s)")
    parser.add_argument(
        "--compile", action="store_true", help="layers to machine code first: minutes, then faster steps"
    )
    parser.add_argument("--out", type=Path, help="folder of the checkpoint (FOLDER/words)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder, out = arguments.folder, arguments.out or arguments.folder / "words"
    if arguments.what == "check":
        return check()
    if not (folder / "train.txt").exists():
        parser.error(f"{folder} has no train.txt; corpus.py writes it")
    if arguments.what == "judge":
        return judge(folder, out)
    run = Run(folder, arguments.minutes)
    if arguments.what == "run":
        torch.set_flush_denormal(True)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, run.stop)
        if arguments.compile:
            run.compile()
        run.learn()
    write_checkpoint(run.model, run.tokenizer, out)
    progress = run.progress
    print(
        f"{out}: {progress.step} steps, {progress.elapsed_s / 60:.1f} minutes, {progress.tokens:,} tokens of the whole"
        f" text and {progress.topics_tokens:,} of its topics again"
    )
    return None


if __name__ == "__main__":
    main()
