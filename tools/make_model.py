"""Make a model folder with random weights and its own tokenizer, and train it briefly under supervision where asked.

    python tools/make_model.py OUT --preset tiny --sft train.jsonl --heldout heldout.jsonl --sft_accuracy 0.35
    python tools/make_model.py OUT --preset qwen3-1.7b

The folder loads with AutoModelForCausalLM, AutoTokenizer and vLLM. `build_model`, `make_tokenizer` and `save` are for
tests too. Legend: B rows, S positions.
"""
import argparse
import json
import os
import time

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

# With another EOS, the class that Transformers loads for a qwen2 folder adds <|endoftext|> past the vocabulary.
PAD, EOS = "<|pad|>", "<|endoftext|>"
NUM_BYTES = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FAMILIES = {"qwen3": "qwen3", "qwen2": "qwen2", "llama": "llama", "gemma3": "gemma3_text"}

TINY = dict(hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=320,
            intermediate_size=384, tied=True, dtype=torch.float32)
QWEN3 = dict(num_kv_heads=8, head_dim=128, vocab_size=151936, dtype=torch.bfloat16)
PRESETS = {
    "tiny": TINY,
    "qwen3-0.6b": dict(QWEN3, hidden_size=1024, num_layers=28, num_heads=16, intermediate_size=3072, tied=True),
    "qwen3-1.7b": dict(QWEN3, hidden_size=2048, num_layers=28, num_heads=16, intermediate_size=6144, tied=True),
    "qwen3-4b": dict(QWEN3, hidden_size=2560, num_layers=36, num_heads=32, intermediate_size=9728, tied=True),
    "qwen3-8b": dict(QWEN3, hidden_size=4096, num_layers=36, num_heads=32, intermediate_size=12288, tied=False),
}


def make_config(family, *, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, vocab_size, intermediate_size,
                tied, **extra):
    """A Transformers config of `family`; `extra` overrides any of its fields.

    gemma3 alternates sliding (window 32) and full attention, so that a few layers have both.
    """
    if family not in FAMILIES:
        raise ValueError(f"family {family!r}: choose from {', '.join(FAMILIES)}")
    fields = dict(
        hidden_size=hidden_size, num_hidden_layers=num_layers, num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads, head_dim=head_dim, vocab_size=vocab_size,
        intermediate_size=intermediate_size, tie_word_embeddings=tied, max_position_embeddings=32768,
        initializer_range=hidden_size ** -0.5, bos_token_id=None, pad_token_id=NUM_BYTES, eos_token_id=NUM_BYTES + 1,
    )
    if family == "qwen2":
        # Qwen2 has no head_dim of its own: it is the quotient.
        assert head_dim * num_heads == hidden_size, f"qwen2: {num_heads} heads x {head_dim} is not {hidden_size}"
    if family == "gemma3":
        layer_types = [("sliding_attention", "full_attention")[i % 2] for i in range(num_layers)]
        fields.update(layer_types=layer_types, sliding_window=32, query_pre_attn_scalar=head_dim)
    return AutoConfig.for_model(FAMILIES[family], **(fields | extra))


def build_model(family, *, dtype=torch.float32, seed=0, **sizes):
    """A causal language model with random weights, on CUDA where there is one; `sizes` as in `make_config`.

    Norm weights and biases get noise of standard deviation 0.1 too: at their usual 1 and 0, code that skips one of
    them would go unnoticed. The caller's random state stays as it was.
    """
    config = make_config(family, **sizes)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def make_tokenizer(vocab_size, phrases=()):
    """A byte-level tokenizer: one id a byte, then pad, EOS, `phrases` (one id each), and filler words to `vocab_size`.

    Any text encodes, and every id below `vocab_size` decodes to text. Fillers never come out of encoding.
    """
    words = sorted(pre_tokenizers.ByteLevel.alphabet()) + [PAD, EOS, *phrases]
    if len(words) > vocab_size:
        raise ValueError(f"vocab_size {vocab_size}: at least {len(words)} is needed for bytes, pad, EOS and phrases")
    words += [f"Ġw{i}" for i in range(len(words), vocab_size)]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=EOS, padding_side="left", chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (NUM_BYTES, NUM_BYTES + 1)
    assert len(tokenizer) == vocab_size, f"{len(tokenizer)} ids, wanted {vocab_size}"
    return tokenizer


def save(folder, model, tokenizer):
    """Write weights (safetensors), config, generation config and tokenizer to `folder`."""
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def encode_rows(tokenizer, rows):
    """(ids, labels), both int64 of shape B x S, padded at the end; labels are -100 outside of the answer and its EOS.

    No attention mask goes with them: causal attention never looks at padding that comes after.
    """
    prompts = [tokenizer.encode(row["prompt"]) for row in rows]
    answers = [tokenizer.encode(row["answer"]) + [tokenizer.eos_token_id] for row in rows]
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers))
    ids = torch.full((len(rows), length), tokenizer.pad_token_id)
    labels = torch.full((len(rows), length), -100)
    for i, (prompt, answer) in enumerate(zip(prompts, answers)):
        ids[i, :len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[i, len(prompt):len(prompt) + len(answer)] = torch.tensor(answer)
    return ids, labels


def supervise(model, tokenizer, rows, heldout, *, steps, batch_size, learning_rate, accuracy, seed):
    """Train on the answers, AdamW and mean loss a token, and return (steps made, held-out greedy accuracy).

    Stops after `steps` steps, or once `accuracy` is reached, which is looked at every 5 steps. The learning rate is
    constant after 30 steps of warm-up: from a start brought down to rate 0, RL loses half of the accuracy before it
    gains any.
    """
    ids_BS, labels_BS = encode_rows(tokenizer, rows)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 30))
    for step in range(1, steps + 1):
        picked = torch.randint(len(rows), (batch_size,), generator=generator)
        loss = model(input_ids=ids_BS[picked].to(model.device), labels=labels_BS[picked].to(model.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == steps:
            reached = greedy_accuracy(model, tokenizer, heldout)
            if step % 50 == 0:
                print(f"supervised step {step}: loss {loss.item():.3f}, held-out accuracy {reached:.3f}", flush=True)
            if reached >= accuracy:
                break
    return step, reached


@torch.no_grad()
def greedy_accuracy(model, tokenizer, rows, max_new_tokens=8):
    """Share of `rows` whose greedy completion is the answer, character by character."""
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True).to(model.device)
    ids_BS = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens,
                            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    texts = tokenizer.batch_decode(ids_BS[:, inputs["input_ids"].shape[1]:], skip_special_tokens=True)
    return sum(text == row["answer"] for text, row in zip(texts, rows)) / len(rows)


def read_jsonl(path):
    """The rows of a JSONL file."""
    with open(path) as file:
        return [json.loads(line) for line in file]


def common_phrases(rows):
    """The words that all prompts begin with, as a list of one phrase, or an empty list.

    As one id they cost one position instead of one a byte.
    """
    prefix = os.path.commonprefix([row["prompt"] for row in rows])
    phrase = prefix[:prefix.rfind(" ") + 1]
    return [phrase] if phrase else []


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", help="folder to write")
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft", help="JSONL with prompt and answer to train on first")
    parser.add_argument("--heldout", help="JSONL with prompt and answer to measure greedy accuracy on")
    parser.add_argument("--sft_steps", type=int, default=600, help="at most")
    parser.add_argument("--sft_accuracy", type=float, default=1.0,
                        help="stop before then at this held-out greedy accuracy")
    parser.add_argument("--sft_batch_size", type=int, default=256, help="rows a step")
    parser.add_argument("--sft_learning_rate", type=float, default=2e-3)
    args = parser.parse_args()
    if bool(args.sft) != bool(args.heldout):
        parser.error("--sft and --heldout go together")
    return args


def main():
    args = parse_args()
    sizes = PRESETS[args.preset]
    train = read_jsonl(args.sft) if args.sft else []
    tokenizer = make_tokenizer(sizes["vocab_size"], common_phrases(train))
    model = build_model("qwen3", seed=args.seed, **sizes)
    if args.sft:
        start = time.perf_counter()
        steps, accuracy = supervise(
            model, tokenizer, train, read_jsonl(args.heldout), steps=args.sft_steps, batch_size=args.sft_batch_size,
            learning_rate=args.sft_learning_rate, accuracy=args.sft_accuracy, seed=args.seed,
        )
        print(f"{steps} supervised steps in {time.perf_counter() - start:.0f} s: "
              f"held-out greedy accuracy {accuracy:.3f}")
    save(args.output, model, tokenizer)
    print(f"{args.output}: {model.num_parameters() / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
