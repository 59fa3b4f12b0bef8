"""The options of `rlspeed preprocess`: names, kinds and help, each once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Template(StrEnum):
    """Which prompts go through the chat template."""

    auto = "auto"
    always = "always"
    never = "never"


class SortOverlong(StrEnum):
    """What happens to rows over --max-length."""

    error = "error"
    drop = "drop"
    truncate_left = "truncate_left"
    keep = "keep"


class PackOverlong(StrEnum):
    """What happens to rows over --max-length, or over the capacity."""

    error = "error"
    drop = "drop"
    truncate_left = "truncate_left"


class SortBadRows(StrEnum):
    """What happens to rows without a usable prompt."""

    error = "error"
    drop = "drop"
    keep = "keep"


class PackBadRows(StrEnum):
    """What happens to rows without a usable prompt."""

    error = "error"
    drop = "drop"


class Codec(StrEnum):
    """Compression of parquet."""

    zstd = "zstd"
    snappy = "snappy"
    gzip = "gzip"
    lz4 = "lz4"
    none = "none"


Inputs = Annotated[list[str], typer.Argument(metavar="IN", help="Parquet or JSONL: files, directories, globs.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="File to write; it appears when it is complete.")]
Tokenizer = Annotated[str, typer.Option("--tokenizer", help="Directory or hub name of the model's tokenizer.")]
MaybeTokenizer = Annotated[
    str | None, typer.Option("--tokenizer", help="Directory or hub name; needed unless rows hold input_ids.")
]
PromptKey = Annotated[str, typer.Option("--prompt-key", help="Column with the prompt.")]
SystemPrompt = Annotated[
    str | None, typer.Option("--system-prompt", help="System message for message lists that have none.")
]
ChatTemplate = Annotated[
    Template, typer.Option("--apply-chat-template", help="auto: message lists only; always: strings too; never.")
]
TemplateKwargs = Annotated[
    str, typer.Option("--chat-template-kwargs", help="JSON object of further arguments for the chat template.")
]
TrustCode = Annotated[bool, typer.Option("--trust-remote-code", help="Let a tokenizer directory run its own code.")]
MaxLength = Annotated[int | None, typer.Option("--max-length", min=1, help="Longest row in tokens.")]
Compression = Annotated[
    Codec | None, typer.Option("--compression", help="Of parquet output; the input's when not given.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an output that exists.")]
MemoryMiB = Annotated[int, typer.Option("--memory", min=1, help="MiB of rows held before scratch files are used.")]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


Descending = Annotated[bool, typer.Option("--descending", help="Longest first.")]
Bucket = Annotated[
    bool, typer.Option("--bucket", help="Rows of similar length together, shuffled in and among the buckets.")
]
BucketRows = Annotated[
    int, typer.Option("--bucket-rows", min=1, help="Rows in a bucket: the batch size, or a multiple.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of --bucket.")]
LongestFirst = Annotated[
    bool, typer.Option("--longest-first", help="With --bucket: begin with the longest row's bucket.")
]
LengthColumn = Annotated[str | None, typer.Option("--length-column", help="Add the length in tokens under this name.")]
SortLong = Annotated[SortOverlong, typer.Option("--overlong", help="Rows over --max-length.")]
SortBad = Annotated[SortBadRows, typer.Option("--bad-rows", help="Rows without a usable prompt.")]
Capacity = Annotated[int, typer.Option("--capacity", min=1, help="Most tokens in a bin.")]
Multiple = Annotated[int, typer.Option("--multiple", min=1, help="Sequence times tensor parallel size.")]
Ranks = Annotated[
    int, typer.Option("--ranks", min=1, help="Deal rows to so many ranks by work; bin j of rank r is row j*N + r.")
]
PackLong = Annotated[PackOverlong, typer.Option("--overlong", help="Rows over --max-length or the capacity.")]
PackBad = Annotated[PackBadRows, typer.Option("--bad-rows", help="Rows without usable tokens.")]
KeepColumns = Annotated[
    bool, typer.Option("--keep-columns", help="Carry the other columns along, as training's rewards need them.")
]
PlanOnly = Annotated[bool, typer.Option("--plan-only", help="Write the bins as row numbers (JSON), no tokens.")]
PackCodec = Annotated[Codec, typer.Option("--compression", help="Of the parquet output.")]
NewTokens = Annotated[
    int | None, typer.Option("--max-new-tokens", min=0, help="Room for the answer in max_length; 512 for prompts.")
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Rows that are padded to each other.")]
Png = Annotated[Path | None, typer.Option("--png", help="Write the histogram as a picture.")]
