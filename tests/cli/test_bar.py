"""What a person reads while a model learns."""

import io

from rich.console import Console

from regard.cli.bar import Bar
from regard.train.loop import Progress


def test_a_dev_figure_stands_beside_the_step_it_is_of():
    for terminal in (False, True):
        out = io.StringIO()
        bar = Bar(Console(file=out, force_terminal=terminal, width=200))
        metrics = {"loss": 2.5, "bleu": 11.2, "step": 1200}
        bar.report(Progress(1234, 0.5, 3.0, 0.001, 5000.0, 60.0, 60.0, 0.5, metrics))
        shown = bar.line.plain if terminal else out.getvalue()
        assert "step 1,234" in shown
        assert "dev at step 1,200: loss 2.50  bleu 11.20" in shown
        bar.report(Progress(1234, 0.5, 3.0, 0.001, 5000.0, 60.0, 60.0, 0.5, {}))
        assert "dev" not in (bar.line.plain if terminal else out.getvalue().splitlines()[-1])
