"""``hpjob data prepare``: text to token files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

data_app = typer.Typer(help="Prepare training data.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the ``data`` commands."""
    app.add_typer(data_app, name="data")


@data_app.callback()
def _group() -> None:
    """Prepare training data."""


@data_app.command()
def prepare(
    sources: Annotated[list[Path], typer.Argument(help="Files of UTF-8 text, or folders that hold some.")],
    out: Annotated[Path, typer.Option(help="Folder to make; data.path of a recipe points to it.")],
    vocab_size: Annotated[int | None, typer.Option(help="Size of the BPE that is trained. [default: 1024]")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Use this tokenizer.json; train none.")] = None,
    suffix: Annotated[
        list[str] | None, typer.Option(help="Only files in folders that end so; may be repeated.")
    ] = None,
    limit_mb: Annotated[float | None, typer.Option(help="Stop after so many megabytes of text.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace token files that are there already.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Turn text into token files: byte-level BPE, documents joined with an end-of-text token."""
    from hpjob.core.errors import EnvironmentProblemError, UserInputError

    if vocab_size is not None and tokenizer is not None:
        raise UserInputError("--vocab-size and --tokenizer exclude each other", hint="leave one of them out")
    if limit_mb is not None and limit_mb <= 0:
        raise UserInputError(f"--limit-mb {limit_mb:g} leaves no text", hint="give a positive number of megabytes")
    try:
        import tokenizers  # noqa: F401

        from hpjob.runtime.data.prepare import PrepareOptions
        from hpjob.runtime.data.prepare import prepare as prepare_files
    except ImportError as error:
        raise EnvironmentProblemError(
            f"package {error.name} is not installed", hint="install it with `pip install 'hpjob[train]'`"
        ) from None
    options = PrepareOptions(
        vocab_size=vocab_size or PrepareOptions().vocab_size,
        tokenizer=tokenizer,
        suffixes=tuple(suffix or ()),
        limit_bytes=None if limit_mb is None else round(limit_mb * 1e6),
    )
    meta = prepare_files(sources, out, options, force=force)
    if as_json:
        typer.echo(meta.model_dump_json(indent=2))
        return
    typer.echo(
        f"{out}: {meta.num_tokens:,} tokens of {meta.num_documents:,} documents "
        f"({meta.source_bytes / 1e6:.1f} MB of text), vocabulary {meta.vocab_size:,}"
    )
