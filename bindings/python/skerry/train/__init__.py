# SPDX-License-Identifier: MIT
"""Training routers: small projections that tell, for a query, which stored segments it will look at.

    python -m skerry.train --help

docs/training.md has the commands from texts to a router file. Capturing, evaluating and the arithmetic of the losses need numpy alone;
fitting needs PyTorch and plots need matplotlib (the package's extra `train`). Nothing here needs the shared library.
"""
