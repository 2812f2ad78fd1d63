"""submitit's Slurm executor with our job script.

submitit submits, reads the job id and keeps the submission file; the text is ours. One underscored hook of
submitit is overridden for that, which is why its version has an upper bound.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from hpjob.core.errors import SlurmRefusedError
from hpjob.slurm.refusal import refusal_hint
from hpjob.slurm.submit_environment import variables_to_remove


class ScriptExecutor(SlurmExecutor):
    """Submits exactly one given job script.

    Args:
        folder: Where submitit keeps its copy of what it submitted.
        script: Text of the job script.
        options: Options of sbatch for this submission only; they win over those in the script.
    """

    def __init__(self, folder: Path, script: str, *, options: tuple[str, ...] = ()) -> None:
        super().__init__(folder=folder)
        self._script = script
        self._options = options

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        # The script starts the runtime by itself, so that it outlives requeues and a second sbatch by
        # hand; submitit's own command would look for a pickle named after the first job id.
        return self._script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        unset = [part for name in variables_to_remove(os.environ) for part in ("-u", name)]
        sbatch, *rest = super()._make_submission_command(submission_file_path)
        return ["env", *unset, sbatch, *self._options, *rest]

    def submit_script(self) -> str:
        """Submit the script and return the job id.

        Raises:
            SlurmRefusedError: sbatch said no; the message holds its words.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        # submitit repeats sbatch's complaint on stderr; it is in the exception as well.
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                return self._submit_command(self._submitit_command_str).job_id
            except (FailedJobError, FailedSubmissionError) as error:
                words = " ".join(str(error).split()) or "sbatch gave no reason"
                raise SlurmRefusedError(f"Slurm refused the job: {words}", hint=refusal_hint(words)) from None
