# SPDX-License-Identifier: Apache-2.0
"""Text to token files.

``command`` has the options; ``sources`` the documents, of files that ``search`` finds
and ``reading`` reads, of Python files (``python_source``), or of the hub; ``tokenizer``
and ``token_files`` write them; ``problems`` counts what is left out, and ``encodings``
recognizes what is not UTF-8.
"""
