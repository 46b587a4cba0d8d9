"""Host time: CPU time of a decode step of a model so narrow that Python, not arithmetic, is what it pays for."""

from collections.abc import Iterable

import kvpatch

from .decode import alternate
from .lines import HOST_ARCH, K, Line, record
from .models import STEPS, build, forward, tokens, twin


def host_lines(policies: Iterable[str], n: int, repeats: int, tiny: bool, steps: int = STEPS) -> Iterable[Line]:
    """One line per policy: `steps` tokens after a prompt of `n`, patched and unpatched in turns in one process.

    There is no lower bound beside them: what memory and multipliers need is a small part of such a step.
    """
    model = build(HOST_ARCH, n, tiny)
    ids = tokens(model, n + steps)
    full = forward(model, ids[:, :n])[0]
    for policy in policies:
        other = twin(model)
        with kvpatch.patched(other, policy, k=K):
            evicting = forward(other, ids[:, :n])[0]
            figures = alternate([(model, full), (other, evicting)], ids, steps, repeats)
        figures.pop("sizes")
        figures |= {"steps": steps, "layers": model.config.num_hidden_layers}
        yield record("host", HOST_ARCH, policy, n, repeats, model, figures)
