"""What importing the tracker costs."""

from __future__ import annotations

import subprocess
import sys


def test_a_constant_of_the_tracker_costs_no_import_of_arrow() -> None:
    code = "import sys, tracker.due_time; sys.exit('pyarrow' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
