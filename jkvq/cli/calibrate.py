"""`jkvq calibrate`: what calibrated caches need to know of a model."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jkvq.cli.shared import AsJson, Dtype, Model, TextOrProse, print_json
from jkvq.defaults import CALIBRATION_TOKENS, DEFAULT_CACHES, DEFAULT_MODEL
from jkvq.support.errors import UserError

if TYPE_CHECKING:
    from jkvq.calibration.artefact import Manifest


def _of(methods: str, help: str, default: str | None = None, *names: str) -> Any:
    """An option that only some methods have; where it is not given their own default holds."""
    shown = default or False
    return typer.Option(*names, help=help, show_default=shown, rich_help_panel=f"For {methods}")


def calibrate(
    method: Annotated[
        str,
        typer.Option(
            help="What to find: jkvq, oscar, hessian, kmeans or blockgtq, for the caches of that "
            "name, or center (means alone), for any cache with center=true."
        ),
    ] = "jkvq",
    model: Model = DEFAULT_MODEL,
    text: TextOrProse = None,
    self_written: Annotated[
        bool, typer.Option("--self", help="Calibrate on text that the model writes.")
    ] = False,
    tokens: Annotated[
        int, typer.Option(help="How many, from the text's beginning.")
    ] = CALIBRATION_TOKENS,
    out: Annotated[
        Path | None,
        typer.Option(help="A new folder.", show_default="where --cache finds it for this model"),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(help="Tokens that see each other.", show_default="2048"),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="The longest sequence that caches are to serve.", show_default="the model's"
        ),
    ] = None,
    learn: Annotated[
        bool,
        typer.Option(
            "--learn",
            help="With jkvq: learn rotations and means through the model, from all of the text, by "
            "what the next tokens' distributions lose. For GPUs.",
        ),
    ] = False,
    learn_from: Annotated[
        Path | None,
        typer.Option(
            help="A calibration's folder that --learn goes on from.",
            show_default="made from the text's first tokens",
        ),
    ] = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
    shared: Annotated[
        bool | None,
        _of("jkvq and oscar", "One rotation for all KV heads of a layer.", None, "--shared"),
    ] = None,
    clip_for: Annotated[
        str | None,
        _of(
            "jkvq and oscar",
            "Choose the clip ratios of each layer for this cache, such as oscar-int2.",
        ),
    ] = None,
    key_target: Annotated[
        str | None,
        _of("oscar", "The second moment that keys are rotated by: q, sq, k.", "q"),
    ] = None,
    value_target: Annotated[
        str | None,
        _of(
            "oscar",
            "The second moment that values are rotated by: output, weighted or v.",
            "output",
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        _of(
            "oscar",
            "Leave out of the rotation: eigenvectors, hadamard or bit-reversal; may be repeated.",
        ),
    ] = None,
    order: Annotated[
        int | None,
        _of("hessian", "Of the block Hadamard behind the rotation.", "the largest up to 128"),
    ] = None,
    centroids: Annotated[int | None, _of("kmeans", "For keys and for values.", "256")] = None,
    starts: Annotated[int | None, _of("kmeans", "Runs, of which the best is kept.", "3")] = None,
    seed: Annotated[
        int | None,
        _of("kmeans and jkvq", "Of the first centroids, or of the order that it learns in.", "0"),
    ] = None,
    learn_for: Annotated[
        str | None, _of("jkvq", "The cache that --learn learns for.", "jkvq-int2")
    ] = None,
    steps: Annotated[int | None, _of("jkvq", "Of --learn.", "800")] = None,
    batch: Annotated[
        int | None, _of("jkvq", "Windows that --learn reads in each step.", "8")
    ] = None,
    rate: Annotated[float | None, _of("jkvq", "Adam's greatest, of --learn.", "0.02")] = None,
    score: Annotated[
        str | None,
        _of(
            "blockgtq",
            "What a rotary block is worth: qk_avg, qk_max, qk_product, k_only or q_only.",
            "qk_avg",
        ),
    ] = None,
):
    """Read a text with a model, and write what calibrated caches need to know of it."""
    if learn and method != "jkvq":
        raise UserError(f"--learn: only method jkvq learns, not {method}; leave one of them out")
    options = {
        "shared": shared,
        "key_target": key_target,
        "value_target": value_target,
        "without": tuple(without) if without else None,
        "order": order,
        "centroids": centroids,
        "starts": starts,
        "seed": seed,
        "score": score,
        "clip_for": clip_for,
        "learn_for": learn_for or ("jkvq-int2" if learn else None),
        "steps": steps,
        "batch": batch,
        "rate": rate,
        "window": window,
        "context": context,
    }
    from jkvq.loading.calibrate import calibrate as calibrate_model

    artefact = calibrate_model(
        model,
        method=method,
        text=text,
        self_written=self_written,
        tokens=tokens,
        out=out,
        dtype=dtype,
        learn_from=learn_from,
        **{name: value for name, value in options.items() if value is not None},
    )
    _report(artefact.manifest, model, out, as_json)


def _report(manifest: "Manifest", model: str, out: Path | None, as_json: bool) -> None:
    from jkvq.calibration.artefact import default_folder

    folder = default_folder(model, manifest.method) if out is None else out
    if as_json:
        print_json({"out": str(folder), **dataclasses.asdict(manifest)})
        return
    read = f"{manifest.tokens:,} tokens of {manifest.corpus}"
    print(f"{model} by {manifest.method} on {read} -> {folder}")
    if learned := manifest.learned:
        kept = f"{learned['kl']:.3g} after step {learned['step']:.0f}"
        print(f"Learned: KL {learned['start_kl']:.3g}, then {kept}, on text that was held out")
    given = "" if out is None else f" --calibration {out}"
    if served := manifest.options.get("learn_for") or _served(manifest.method):
        print(f'Use it: jkvq generate "Hello" --model {model} --cache {served}{given}')


def _served(method: str) -> str | None:
    """A cache that a method's calibration is made for."""
    from jkvq.cache.calibrated import methods_for
    from jkvq.cache.specs.presets import PRESETS
    from jkvq.cache.specs.spec_text import parse_spec

    names = (*PRESETS, *DEFAULT_CACHES)
    return next((name for name in names if method in methods_for(parse_spec(name))[:1]), None)
