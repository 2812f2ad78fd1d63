"""An engine of one rank of a pipeline without the others."""

from hpjob.runtime.engine import Engine
from hpjob.runtime.rehearsal.timed_engine import SilentTransport


class AloneEngine(Engine):
    """Gets noise from its neighbours in a pipeline; the same after the same seed of torch."""

    transport_class = SilentTransport
