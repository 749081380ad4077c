# SPDX-License-Identifier: Apache-2.0
"""Text to token files: one module per corpus, ``tokenizer`` and ``token_files`` shared by all."""
