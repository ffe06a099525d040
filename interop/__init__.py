"""Bridges to other array libraries. Reached as ``cuattn.interop``; a stray top-level import must fail."""

from .. import errors as errors
