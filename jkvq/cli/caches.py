"""`jkvq caches`: the caches by name."""

from typing import Annotated, Any

import typer

from jkvq.cli.shared import AsJson, print_json, print_table, require_positive
from jkvq.support.errors import UserError


def caches(
    head_dim: Annotated[int, typer.Option(help="Channels per head.")] = 128,
    context: Annotated[int, typer.Option(help="Tokens per sequence.")] = 131072,
    as_json: AsJson = False,
):
    """List the caches by name, with what they store.

    Those that `jkvq tune` named come last, without their bits: these depend on the model's layers.
    """
    require_positive(head_dim=head_dim, context=context)
    listed = _listed(head_dim, context)
    if as_json:
        print_json({"head_dim": head_dim, "context": context, "caches": listed})
        return
    rows = (
        (
            name,
            "" if found["bits_per_element"] is None else f"{found['bits_per_element']:.3f}",
            "yes" if found["calibrated"] else "",
            found["about"],
        )
        for name, found in listed.items()
    )
    title = f"Caches; bits per element for heads of {head_dim} at {context:,} tokens"
    print_table(title, ("name", "bits", "calibrated", "what it stores"), rows)


def _listed(head_dim: int, context: int) -> dict[str, dict[str, Any]]:
    """What there is to say of each cache that heads and contexts of these sizes can have."""
    from jkvq.cache.footprint import bits_per_element
    from jkvq.cache.shape import CacheShape
    from jkvq.cache.specs.kept_names import kept_names
    from jkvq.cache.specs.presets import PRESETS

    shape, listed = CacheShape(1, 1, head_dim), {}
    for name, preset in PRESETS.items():
        try:
            preset.spec.check(1, head_dim, context)
        except UserError:
            continue
        listed[name] = {
            "bits_per_element": bits_per_element(preset.spec, shape, context),
            "calibrated": preset.spec.key.calibrated or preset.spec.value.calibrated,
            "about": preset.about,
        }
    for name, text in kept_names().items():
        listed[name] = {"bits_per_element": None, "calibrated": True, "about": text}
    return listed
