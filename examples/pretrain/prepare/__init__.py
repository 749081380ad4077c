# SPDX-License-Identifier: Apache-2.0
"""Text to token files: ``command`` has the corpora, ``sources`` reads, ``token_files``
writes.
"""
