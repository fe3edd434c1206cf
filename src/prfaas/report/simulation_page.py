"""A simulation as one self-contained HTML file."""

from prfaas.report.html import HtmlPage
from prfaas.report.simulation import SimulationReport, decision_rows, headline, stage_rows
from prfaas.report.simulation_plots import figures


def simulation_page(report: SimulationReport) -> str:
    """The whole file; the same report gives the same text."""
    page = HtmlPage(report.title, report.lead)
    names = [run.name for run in report.runs]
    page.table(["", *names], headline(report))
    if len(names) > 1:
        page.note(
            f"Small print: difference from {names[0]}. All policies had the same requests at the same times."
        )
    for heading, drawn, caption in figures(report):
        page.heading(heading)
        if heading == "Decisions":
            page.table(["reason", *names], decision_rows(report))
        page.figure(drawn, caption)
    page.heading("Busy, and waiting on average")
    page.table(["stage", *names], stage_rows(report))
    page.heading("What was simulated")
    page.facts(report.facts)
    for note in report.notes:
        page.note(note)
    if report.command:
        page.code(report.command)
    return page.text()
