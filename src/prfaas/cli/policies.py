"""`prfaas policies`: the routing policies that there are, and what an operator may set of each."""

from typing import TYPE_CHECKING, Any

from prfaas.cli.common import AsJson, CliError, console, print_json
from prfaas.cli.completions import policy_names
from prfaas.cli.option_groups import argument, with_options

if TYPE_CHECKING:
    from prfaas.core.scheduling.parameters import Parameter


@with_options
def policies(
    policy: str | None = argument(
        None,
        "One policy, or package.module:Class; default: all with a name.",
        metavar="[NAME]",
        autocompletion=policy_names,
    ),
    as_json: AsJson = False,
) -> None:
    """List routing policies: name, package, and parameters with their defaults and bounds.

    Those of other packages are found by the entry point group `prfaas.policies`.

    Examples: prfaas policies; prfaas policies tilted; prfaas policies mypackage.mymodule:MyPolicy
    """
    from prfaas.core.scheduling.parameters import PolicyError
    from prfaas.core.scheduling.policy import known_policies

    known = known_policies()
    rows = []
    for name in known if policy is None else (policy,):
        try:
            rows.append(_row(name, known.get(name, name.partition(":")[0])))
        except PolicyError as error:
            if policy is not None:
                raise CliError(str(error)) from error
            rows.append(
                {"name": name, "from": known[name], "text": "", "parameters": [], "problem": str(error)}
            )
    if as_json:
        print_json(rows if policy is None else rows[0])
    else:
        _print(rows)


def _row(name: str, source: str) -> dict[str, Any]:
    import inspect

    from prfaas.core.scheduling.parameters import parameters_of
    from prfaas.core.scheduling.policy import policy_class

    found = policy_class(name)
    text = (inspect.getdoc(found) or "").partition("\n\n")[0].replace("\n", " ")
    parameters = [_document(each) for each in parameters_of(found).values()]
    return {"name": name, "from": source, "text": text, "parameters": parameters, "problem": None}


def _document(parameter: "Parameter") -> dict[str, Any]:
    bounds = parameter.bounds
    return {
        "name": parameter.name,
        "default": parameter.default,
        "must_be": parameter.expected,
        "text": bounds.text,
        "unit": bounds.unit,
        "least": bounds.least,
        "above": bounds.above,
        "most": bounds.most,
        "below": bounds.below,
        "words": list(parameter.words),
    }


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.text import Text

    from prfaas.core.scheduling.parameters import shown

    out = console()
    out.soft_wrap = True
    for row in rows:
        out.print(Text.assemble((row["name"], "bold"), f"  ({row['from']})"))
        if row["problem"] is not None:
            out.print(Text(f"  can't be used: {row['problem']}"))
        if row["text"]:
            out.print(Text(f"  {row['text']}"))
        for each in row["parameters"]:
            default = "must be given" if each["default"] is None else f"default {shown(each['default'])}"
            text = f": {each['text']}" if each["text"] else ""
            out.print(Text(f"    {each['name']}{text} ({each['must_be']}; {default})"))
