# SPDX-License-Identifier: MIT
"""Enumerations as strings: SKERRY_FORMAT_R3 is "r3". A value that these headers do not know reads "other(<number>)"."""

from . import _abi


class Names:
    """Two-way map of one enumeration."""

    def __init__(self, what, prefix, leave_out=()):
        self.what = what
        self.values = {
            name[len(prefix):].lower(): value
            for name, value in vars(_abi).items()
            if name.startswith(prefix) and name[len(prefix):] not in leave_out
        }
        self._names = {value: name for name, value in self.values.items()}

    def name(self, value):
        return self._names.get(value) or f'other({value})'

    def value(self, given):
        """Number of a name. A number passes unchanged, so that values of a newer library can be used."""
        if isinstance(given, str):
            try:
                return self.values[given.lower()]
            except KeyError:
                known = ', '.join(self.values)
                raise ValueError(f'{given!r} is not a {self.what}; known are {known}') from None
        if isinstance(given, int) and not isinstance(given, bool):
            return given
        raise TypeError(f'a {self.what} is a name, not {type(given).__name__}')


class Flags(Names):
    """A set of bits as a tuple of names."""

    def name(self, value):
        found = tuple(name for name, bit in self.values.items() if value & bit)
        left = value
        for bit in self.values.values():
            left &= ~bit
        return found + ((f'other({left:#x})',) if left else ())

    def value(self, given):
        if given is None:
            return 0
        if isinstance(given, (str, int)):
            return super().value(given)
        bits = 0
        for one in given:
            bits |= super().value(one)
        return bits


_POLICY_FLAGS = ('KEEP_EXACT', 'ONE_WAY', 'EVICT_FIRST')

STATUS = Names('status', 'SKERRY_ERROR_')
SUBJECT = Names('subject', 'SKERRY_SUBJECT_')
LOG_LEVEL = Names('log level', 'SKERRY_LOG_')
DTYPE = Names('number type', 'SKERRY_DTYPE_')
DEVICE = Names('device type', 'SKERRY_DEVICE_')
FORMAT = Names('format', 'SKERRY_FORMAT_')
TIER = Names('tier', 'SKERRY_TIER_')
PAIRING = Names('rotary pairing', 'SKERRY_ROTARY_')
POLICY = Names('policy', 'SKERRY_POLICY_', leave_out=_POLICY_FLAGS)
FIDELITY = Names('fidelity', 'SKERRY_FIDELITY_')
PREFILL = Names('prefill mode', 'SKERRY_PREFILL_')
SCORE = Names('score', 'SKERRY_SCORE_')
SELECTION = Names('selection', 'SKERRY_SELECTION_')
NONFINITE = Names('rule for values that are not finite', 'SKERRY_NONFINITE_')
TIERS = Flags('tier', 'SKERRY_TIERS_')
CPU = Flags('CPU feature', 'SKERRY_CPU_')
POLICY_FLAGS = Flags('policy flag', 'SKERRY_POLICY_', leave_out=tuple(
    name[len('SKERRY_POLICY_'):] for name in vars(_abi)
    if name.startswith('SKERRY_POLICY_') and name[len('SKERRY_POLICY_'):] not in _POLICY_FLAGS))
SEGMENTS = Names('segmentation', 'SKERRY_SEGMENTS_')
ZOOM_MISS = Names('rule for windows that have not arrived', 'SKERRY_ZOOM_')
ROUTER_FORM = Names('router form', 'SKERRY_ROUTER_FORM_')
ROUTER_POOLING = Names('router pooling', 'SKERRY_ROUTER_POOLING_')
ROUTER_FLAGS = Flags('router flag', 'SKERRY_ROUTER_', leave_out=tuple(
    name[len('SKERRY_ROUTER_'):] for name in vars(_abi) if name.startswith(('SKERRY_ROUTER_FORM_', 'SKERRY_ROUTER_POOLING_'))))
SEQUENCE_FLAGS = Flags('sequence flag', 'SKERRY_SEQ_')
RANGE_FLAGS = Flags('range flag', 'SKERRY_RANGE_')
