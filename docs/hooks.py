"""For mkdocs, what mkdocs.yml cannot say: the address of the repository, and links inside docstrings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import tomllib

# The host of the address in pyproject.toml as long as the repository has no public address.
PLACEHOLDER = "repository.invalid"


def on_config(config: Any) -> None:
    """Links the repository at the top of each page, once pyproject.toml has its address."""
    text = Path(config.config_file_path).with_name("pyproject.toml").read_text(encoding="utf-8")
    address = tomllib.loads(text)["project"]["urls"]["Repository"]
    if PLACEHOLDER not in address:
        config.repo_url, config.repo_name = address, config.site_name


def on_page_content(html: str, page: Any, files: Any, **_: Any) -> str:
    """Makes links of the pages and public names in docstrings. Raises KeyError if a page does not exist."""
    if page.file.src_uri != "api.md":
        return html

    def page_link(match: re.Match[str]) -> str:
        target = files.src_uris[f"{match[1]}.md"]
        return f'<a href="{target.url}">{target.page.title}</a>'

    html = re.sub(r"\bdocs/([\w/-]+)\.md\b", page_link, html)
    names = "|".join(re.findall(r'<h2 id="sdfastgn\.(\w+)"', html))
    return re.sub(rf"<code>(?:sdfastgn\.)?({names})</code>", r'<a href="#sdfastgn.\1">\g<0></a>', html)
