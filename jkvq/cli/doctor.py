"""`jkvq doctor`: what this machine is, and what is wrong with it."""

import dataclasses

from jkvq.cli.shared import AsJson, print_json, print_table


def doctor(as_json: AsJson = False):
    """Report versions, devices and folders, what `generate` would choose here, and problems."""
    from jkvq.loading.doctor import diagnose

    found = diagnose()
    problems = [each for each in found if each.advice is not None]
    if as_json:
        listed = [dataclasses.asdict(each) for each in found]
        print_json({"problems": len(problems), "findings": listed})
        return
    section = None
    rows = []
    for each in found:
        heading = each.section if each.section != section else ""
        rows.append((heading, each.name, each.value, "!" if each.advice else ""))
        section = each.section
    print_table("", ("", "", "", ""), rows)
    for each in problems:
        print(f"! {each.section}, {each.name}: {each.advice}")
    if not problems:
        print("No problems found.")
