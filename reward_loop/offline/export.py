"""The command ``reward-loop export``: the rollouts in a folder of records, in formats that other programs read.

- JSON Lines with the keys of verl's rollout dumps (``trainer.rollout_data_dir``).
- Parquet with the columns of a transcript database of Inspect Scout
  (https://meridianlabs-ai.github.io/inspect_scout/db_schema.html), whose messages are those of inspect_ai.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from reward_loop._util.json import decode, encode
from reward_loop._util.standard_streams import console
from reward_loop._util.text import counted
from reward_loop.errors import ConfigError
from reward_loop.offline import cli_options
from reward_loop.offline.folder import replacing
from reward_loop.offline.inputs import import_pyarrow, is_parquet
from reward_loop.offline.notes import Notes
from reward_loop.offline.turns import Part, Turn, prompt_turns, response_turns
from reward_loop.records import RecordsReader

BATCH = 100
"""The number of transcripts that are written together."""

COLUMNS = {
    "transcript_id": "string",
    "source_type": "string",
    "source_id": "string",
    "source_uri": "string",
    "date": "string",
    "task_set": "string",
    "task_id": "string",
    "score": "string",
    "score_explanation": "string",
    "message_count": "int64",
    "error": "string",
    "messages": "string",
    # Scout treats other columns as metadata.
    "uid": "string",
    "step": "int64",
    "validate": "bool",
    "outcome": "string",
    "advantage": "double",
    "ground_truth": "string",
    "components": "string",
    "note": "string",
}
"""The columns of transcripts, with their types in Arrow. `score`, `messages`, `ground_truth`, `components` are JSON."""

Rollouts = Iterator[tuple[dict[str, Any], dict[str, Any]]]
"""The row of each sample, with its ``note``, and the line of its texts."""

# inspect_ai has only the roles system, user, assistant and tool.
_ROLES = {"developer": "system", "ipython": "tool", "function": "tool", "observation": "tool"}


def export(
    folder: cli_options.RecordsFolder,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The file to write: JSON Lines (.jsonl), or transcripts for Inspect Scout (.parquet).",
        ),
    ],
    step: cli_options.Steps = None,
) -> None:
    """Export the rollouts of a run with their rewards and notes.

    JSON Lines have step, input, output, gts and score, as verl's rollout dumps,
    and the components. Parquet files have the messages and the tool calls of
    each rollout; Inspect Scout reads a folder of them as a transcript database.
    Samples whose texts were not recorded are left out.
    """
    if not is_parquet(output) and output.suffix.lower() != ".jsonl":
        raise ConfigError(f"--output {output}: the file is JSON Lines (.jsonl) or parquet (.parquet)")
    # Readers of the folder would take the file for one of records.
    if output.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"--output {output}: it must not be in the folder of records")
    reader, left_out = RecordsReader(folder), 0
    steps = None if step is None else cli_options.step_range(step)
    notes = Notes(folder).texts()

    def rollouts() -> Rollouts:
        nonlocal left_out
        for row in reader.rows():
            if steps is None or row.get("step") in steps:
                texts = reader.text(row)
                left_out += texts is None
                if texts is not None:
                    yield row | {"note": notes.get(row["id"])}, texts

    output.parent.mkdir(parents=True, exist_ok=True)
    with replacing(output) as temporary:
        if is_parquet(output):
            count = _write_transcripts(temporary, reader, rollouts())
        else:
            count = _write_lines(temporary, rollouts())
        # Within the block, so that a file of an earlier export stays.
        if not count:
            raise ConfigError(f"{folder} has no samples with recorded texts" + (f" in step {step}" if step else ""))
    without = f"; {counted(left_out, 'sample')} without texts left out" if left_out else ""
    console().print(f"{counted(count, 'rollout')} in {escape(str(output))}{without}")


def _write_lines(path: Path, rollouts: Rollouts) -> int:
    count = 0
    with path.open("wb") as file:
        for row, texts in rollouts:
            file.write(encode(dump_line(row, texts)) + b"\n")
            count += 1
    return count


def _write_transcripts(path: Path, reader: RecordsReader, rollouts: Rollouts) -> int:
    pa, parquet = import_pyarrow(path)
    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in COLUMNS.items()])
    count = 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        while batch := list(itertools.islice(rollouts, BATCH)):
            rows = [transcript(reader.folder, row, texts, reader.exchanges(row)) for row, texts in batch]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
            count += len(batch)
    return count


def dump_line(row: Mapping[str, Any], texts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rollout with the keys of verl's rollout dumps; ``score`` is the reward that is trained on.

    Args:
        row: the row of the sample, with its ``note``.
        texts: the line of its texts.
    """
    prompt = texts.get("prompt")
    if not isinstance(prompt, str):
        parts = [[turn.role, *(part.text for part in turn.parts)] for turn in prompt_turns(texts) or ()]
        prompt = "\n".join(map("\n".join, parts)) if parts else _text(prompt)
    names = ("step", "uid", "group", "validate", "data_source", "outcome", "error", "note")
    return {
        **_components(row, texts),
        **{name: row.get(name) for name in names},
        "input": prompt,
        "output": texts.get("response"),
        "gts": texts.get("ground_truth"),
        "score": row.get("reward"),
    }


def transcript(
    folder: Path, row: Mapping[str, Any], texts: Mapping[str, Any], exchanges: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a rollout as a transcript of Inspect Scout, with the values of `COLUMNS`.

    Args:
        folder: the folder of records, which is the source of the transcript.
        row: the row of the sample, with its ``note``.
        texts: the line of its texts.
        exchanges: its exchanges with judges, whose replies explain the score.
    """
    prompt = prompt_turns(texts) or [Turn("user", [Part("text", _text(texts.get("prompt")))])]
    response = response_turns(texts) or [Turn("assistant", [Part("text", _text(texts.get("response")))])]
    messages = [one for number, turn in enumerate([*prompt, *response]) for one in _messages(turn, number)]
    for number, message in enumerate(messages):
        message["id"] = f"{row['id']}-{number}"
    replies = [exchange["reply"] for exchange in exchanges if isinstance(exchange.get("reply"), str)]
    known = {name: row.get(name) for name in COLUMNS if name in row}
    return known | {
        "transcript_id": row["id"],
        "source_type": "reward_loop",
        "source_id": str(folder.absolute()),
        "source_uri": folder.absolute().as_uri(),
        "date": datetime.fromtimestamp(row["time"], UTC).isoformat(),
        "task_set": row.get("data_source"),
        "task_id": row.get("group") or row.get("uid"),
        "score": None if row.get("reward") is None else _json(row["reward"]),
        "score_explanation": "\n\n".join(replies) or None,
        "message_count": len(messages),
        "messages": _json(messages),
        "ground_truth": None if texts.get("ground_truth") is None else _json(texts["ground_truth"]),
        "components": _json(_components(row, texts)),
    }


def _messages(turn: Turn, number: int) -> Iterator[dict[str, Any]]:
    """Yield the messages of a turn: the results of its calls are messages of their own."""
    role = _ROLES.get(turn.role, turn.role)
    calls, results, content = [], [], []
    for place, part in enumerate(turn.parts):
        if part.kind == "call":
            name = part.id or f"call-{number}-{place}"
            calls.append({"id": name, "function": part.name or "unknown", "type": "function", **_arguments(part)})
            if part.result is not None:
                results.append({"role": "tool", "content": part.result, "tool_call_id": name, "function": part.name})
        elif part.kind == "reasoning":
            content.append({"type": "reasoning", "reasoning": part.text})
        else:
            content.append({"type": "text", "text": part.text})
    text = content[0]["text"] if len(content) == 1 and "text" in content[0] else content or ""
    yield {
        "role": role if role in ("system", "assistant", "tool") else "user",
        "content": text,
        **({"tool_calls": calls} if calls else {}),
    }
    yield from results


def _arguments(call: Part) -> dict[str, Any]:
    """Return the arguments of a call; what is not a JSON object is an error of the model, as inspect_ai records it."""
    try:
        arguments = decode(call.text)
    except ValueError:
        arguments = None
    if call.name is not None and isinstance(arguments, dict):
        return {"arguments": arguments}
    return {"arguments": {}, "parse_error": call.text}


def _components(row: Mapping[str, Any], texts: Mapping[str, Any]) -> dict[str, Any]:
    return {**(row.get("components") or {}), **(texts.get("components") or {})}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else _json(value)


def _json(value: Any) -> str:
    return encode(value).decode()
