"""Floating-point operations of a step's forward and backward, by arithmetic; a multiplication and an addition are two.

Linear layers count by tokens, the output projection by target tokens, attention by the pairs of tokens that see each
other. Norms, activations and the softmax are left out. `docs/shared_prompts.md` has the formulas.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Passes over the operations of one forward.
LINEAR_BACKWARD = 2  # a product for each of the two operands
ATTENTION_BACKWARD = 2.5  # five products for the forward's two: the scores are computed again inside the kernel
HEAD_BACKWARD = 3  # the logits again, then a product for each operand


# Part of a device's name -> its dense bf16 peak in TFLOP/s, by its data sheet.
PEAK_TFLOPS = {"H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "B200": 2250, "L40S": 362, "MI300X": 1307}


def peak_tflops(device_name: str) -> float:
    """The data sheet's bf16 peak, or 0 for a device that is not in the table."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device_name), 0)


@dataclass(frozen=True)
class Flops:
    """One forward pass over some tokens, by kind."""

    linear: int = 0
    head: int = 0
    attention: int = 0
    last: int = 0
    """The part of `linear` that a block ends with: its recomputation stops before, since backward needs no result."""

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.linear + other.linear, self.head + other.head, self.attention + other.attention,
                     self.last + other.last)

    @property
    def forward(self) -> int:
        """Of the forward pass alone."""
        return self.linear + self.head + self.attention

    def training(self, recomputed: float) -> float:
        """Executed by forward and backward; recomputed: share of the blocks whose forward is done twice."""
        blocks = self.linear * (1 + LINEAR_BACKWARD + recomputed) - self.last * recomputed
        attention = self.attention * (1 + ATTENTION_BACKWARD + recomputed)
        return blocks + attention + self.head * (1 + HEAD_BACKWARD)

    @property
    def useful(self) -> int:
        """What forward and backward need without any recomputation: three forwards."""
        return 3 * self.forward


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides its operations, and its memory. The default counts tokens alone."""

    linear_parameters: int = 1
    """Entries of the blocks' matrices."""
    last_parameters: int = 0
    """Those of them that a block ends with."""
    windows: tuple[int | None, ...] = ()
    """For each block the tokens that a position sees back, itself included; None is all."""
    query_width: int = 0
    """Query heads times head size."""
    key_width: int = 0
    """Key heads times head size."""
    vocabulary: int = 0
    hidden: int = 0
    intermediate: int = 0
    """Width inside the MLP."""
    num_parameters: int = 0
    """Entries of all parameters, a tied one once."""
    largest_parameter: int = 0
    """Entries of the largest one."""

    @property
    def head_parameters(self) -> int:
        """Of the output projection, V times H."""
        return self.vocabulary * self.hidden

    def of(self, prompt_length: int, completion_lengths: Sequence[int]) -> Flops:
        """Forward of one prompt, computed once, and the completions that see it."""
        num_targets = sum(completion_lengths)
        pairs = 0
        for window in set(self.windows):
            seen = seen_pairs(0, prompt_length, window)
            seen += sum(seen_pairs(prompt_length, length, window) for length in completion_lengths)
            pairs += seen * self.windows.count(window)
        num_tokens = prompt_length + num_targets
        return Flops(linear=2 * self.linear_parameters * num_tokens, head=2 * self.head_parameters * num_targets,
                     attention=4 * self.query_width * pairs, last=2 * self.last_parameters * num_tokens)

    def of_copies(self, prompt_length: int, completion_lengths: Sequence[int]) -> Flops:
        """The same with a copy of the prompt for each completion."""
        return sum((self.of(prompt_length, [length]) for length in completion_lengths), Flops())


def seen_pairs(prompt_length: int, length: int, window: int | None) -> int:
    """(query, key) pairs of `length` tokens that follow `prompt_length` others and see those and their own past."""
    if window is None or window >= prompt_length + length:
        return length * prompt_length + length * (length + 1) // 2
    # Position p, from 0, sees min(p + 1, window) tokens.
    growing = max(0, min(prompt_length + length, window) - prompt_length)
    return growing * prompt_length + growing * (growing + 1) // 2 + (length - growing) * window
