"""Arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

DeploymentPath = Annotated[
    Path, typer.Argument(metavar="DEPLOYMENT", help="The deployment file, for example examples/local.yaml.")
]
InstanceName = Annotated[
    str, typer.Argument(metavar="NAME", help="An instance's name in the deployment file.")
]
StartTimeout = Annotated[
    float | None,
    typer.Option(
        "--start-timeout",
        metavar="SECONDS",
        min=1.0,
        help="Give engines up that are not ready by then; default: 1200.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document in place of text.")]
