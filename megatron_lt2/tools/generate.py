"""Generate text from an exported folder, with torch and transformers only.

`python -m megatron_lt2.tools.generate --model RUN/hf --prompt "Once" --prompt "def"`

The folder's own model code runs (trust_remote_code), so name only folders that you trust. Prompts
of different lengths go through as one left-padded batch.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Print one continuation a prompt."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_lt2.tools.generate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", required=True, help="folder written by convert.py export")
    parser.add_argument(
        "--prompt", action="append", required=True, help="may be given several times"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, help="default: 64")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token; default: 0.8"
    )
    parser.add_argument("--top-k", type=int, default=50, help="default: 50")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling; default: 0")
    parser.add_argument("--loops", type=int, help="run the layers this often; default: as trained")
    parser.add_argument(
        "--exit-threshold",
        type=float,
        metavar="Q",
        help="take for each token the first loop by which it has left with probability Q; needs a "
        "model with an exit gate",
    )
    parser.add_argument(
        "--exit-step", type=int, metavar="T", help="take loop T, from 1, and run no later one"
    )
    args = parser.parse_args(argv)
    names = ("loops", "exit_threshold", "exit_step")
    exits = {name: value for name in names if (value := getattr(args, name)) is not None}
    file = Path(args.model) / "config.json"
    if not file.is_file():
        print(
            f"error: {args.model}: no config.json here, so not an exported model", file=sys.stderr
        )
        return 2
    if exits and (problem := exit_problem(exits, json.loads(file.read_text(encoding="utf-8")))):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    if args.max_new_tokens < 1 or args.top_k < 0 or not 0 <= args.temperature < float("inf"):
        print(
            "error: --max-new-tokens must be 1 or more, --top-k and --temperature 0 or more",
            file=sys.stderr,
        )
        return 2
    started = time.monotonic()
    texts, new_tokens = generate(
        args.model,
        args.prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
        exits=exits,
    )
    for prompt, text in zip(args.prompt, texts, strict=True):
        print(f"> {prompt}\n  {'  '.join(text.splitlines(keepends=True))}\n")
    print(f"{new_tokens} tokens in {time.monotonic() - started:.1f} s, loading included")
    return 0


def exit_problem(exits: Mapping[str, float], config: Mapping[str, Any]) -> str | None:
    """Why a model with this config.json cannot run so, or None."""
    trained = config.get("loops")
    if config.get("model_type") != "lt2" or trained is None:
        option = next(iter(exits)).replace("_", "-")
        kind = config.get("model_type")
        return f"--{option} is for LT2 exports, and this folder has model type {kind!r}"
    loops, threshold = exits.get("loops", trained), exits.get("exit_threshold")
    if loops < 1 or loops > trained and config.get("loop_residual") == "per_channel":
        limit = f"1 to {trained}" if config.get("loop_residual") == "per_channel" else "1 or more"
        return f"--loops {loops}: this model can run {limit}"
    if threshold is not None and "exit_step" in exits:
        return f"--exit-threshold {threshold} and --exit-step {exits['exit_step']}: give one"
    if threshold is not None and not config.get("exit_gate"):
        return f"--exit-threshold {threshold}: this model has no exit gate; use --exit-step"
    if threshold is not None and not 0 <= threshold <= 1:
        return f"--exit-threshold {threshold} is no probability; give one from 0 to 1"
    if not 1 <= exits.get("exit_step", 1) <= loops:
        return f"--exit-step {exits['exit_step']}: choose a loop from 1 to {loops}"
    return None


def generate(
    model_dir: str,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    exits: Mapping[str, float] | None = None,
) -> tuple[list[str], int]:
    """Continue each prompt; returns the whole texts and how many tokens were generated in all.

    `temperature` 0 is greedy. One seed gives one result, whatever ran before. `exits` are arguments
    of the model: loops, exit_threshold, exit_step.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    # The tokenizer looks at config.json too, whose model type only the folder's own code knows.
    tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=True)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(model_dir, trust_remote_code=True).eval()
    if torch.cuda.is_available():
        model = model.cuda()
    torch.manual_seed(seed)
    # A model continues something: an empty prompt starts a new document.
    texts = [prompt or tokenizer.eos_token for prompt in prompts]
    batch = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
    sampling = {"temperature": temperature, "top_k": top_k} if temperature > 0 else {}
    with torch.inference_mode():
        output = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=temperature > 0,
            pad_token_id=tokenizer.pad_token_id,
            **sampling,
            **(exits or {}),
        )
    fresh = output[:, batch["input_ids"].shape[1] :]
    num_new = int((fresh != tokenizer.pad_token_id).sum())
    return [tokenizer.decode(row, skip_special_tokens=True) for row in output], num_new


if __name__ == "__main__":
    sys.exit(main())
