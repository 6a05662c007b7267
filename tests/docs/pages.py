"""The guides as data: command blocks with the mark ahead of each, links, headings."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
COMMANDS = ("bash", "python")
OUTPUTS = ("json", "text")
DISGUISES = ("", "sh", "shell", "zsh", "console", "shell-session", "shellsession", "py", "python3", "pycon", "ipython")
"""Fences that may hold commands and would not be run."""
MARKS = ("serves", "shows", "not run")
TOOLS = ("curl", "java", "mvn", "node", "npm", "npx", "docker", "podman", "buildah", "nginx", "kubectl")
"""Programs that blocks may call and that come neither with the checkout nor with every machine."""

_MARKDOWN = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True, slots=True)
class Block:
    """A command block.

    Attributes:
        line: of its opening fence, from 1.
        serves: it starts a service in the foreground.
        reason: why it is not run; None when it is.
        shows: the output that the page shows for it, with the kind of its fence.
    """

    page: str
    line: int
    language: str
    text: str
    serves: bool = False
    reason: str | None = None
    shows: tuple[str, str] | None = None

    @property
    def needs_engine(self) -> bool:
        """Whether running it loads vLLM."""
        starts = re.search(r"scripts/serve|batchserve serve|batchserve doctor", self.text)
        return self.reason is None and starts is not None and "--backend fake" not in self.text

    @property
    def missing_tools(self) -> list[str]:
        """Programs that it calls and that are not installed here."""
        called = set(re.findall(r"[\w-]+", self.text)) if self.language == "bash" else set()
        return [tool for tool in TOOLS if tool in called and shutil.which(tool) is None]


@dataclass(slots=True)
class Page:
    """A page's command blocks in order, and what is wrong with its marks."""

    name: str
    blocks: list[Block] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)

    @property
    def to_run(self) -> list[Block]:
        """The blocks that are run."""
        return [block for block in self.blocks if block.reason is None]

    def complain(self, token: Token, message: str) -> None:
        """Note a mistake with its place."""
        self.mistakes.append(f"{self.name}:{_line(token)}: {message}")


def all_pages() -> list[Page]:
    """README.md and docs/*.md."""
    return [read_page(path) for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]


def read_page(path: Path, root: Path = ROOT) -> Page:
    """The command blocks of one page."""
    page = Page(str(path.relative_to(root)))
    for comment, fence in _pieces(_MARKDOWN.parse(path.read_text(encoding="utf-8"))):
        mark, reason = _mark(comment)
        if fence is None:
            if comment is not None and mark in MARKS:
                page.complain(comment, f"the mark {mark!r} stands before no code block")
        elif (language := _language(fence)) in COMMANDS:
            _add_command(page, fence, language, mark, reason)
        elif language in DISGUISES or not re.fullmatch(r"[a-z][a-z0-9+#-]*", language):
            page.complain(fence, f"a code block {language!r} is not run: call it bash, python, or what it is")
        elif mark == "shows":
            _add_output(page, fence, language)
        elif mark in MARKS:
            page.complain(fence, f"the mark {mark!r} stands before {language!r}, which is not run anyway")
    return page


def _pieces(tokens: list[Token]) -> Iterator[tuple[Token | None, Token | None]]:
    """Each code block with the comment just before it; each other comment with None."""
    comment: Token | None = None
    for token in tokens:
        is_code = token.type in ("fence", "code_block")
        if is_code or comment is not None:
            yield comment, token if is_code else None
        comment = token if token.type == "html_block" and token.content.startswith("<!--") else None
    if comment is not None:
        yield comment, None


def _language(fence: Token) -> str:
    """The first word behind the fence, as GitHub takes it; what follows is no part of it."""
    return next(iter(fence.info.split()), "").lower()


def _mark(comment: Token | None) -> tuple[str, str]:
    """The word of a comment and what stands behind its colon."""
    if comment is None:
        return "", ""
    text = comment.content.strip().removeprefix("<!--").removesuffix("-->")
    mark, _, reason = text.partition(":")
    return mark.strip(), " ".join(reason.split())


def _add_command(page: Page, fence: Token, language: str, mark: str, reason: str) -> None:
    block = Block(page.name, _line(fence), language, fence.content)
    if mark == "not run":
        if not reason:
            page.complain(fence, "'not run' gives no reason: write <!-- not run: REASON -->")
        block = replace(block, reason=reason)
    elif mark == "serves" and not reason:
        block = replace(block, serves=True)
    elif mark:
        page.complain(fence, f"unknown mark {mark!r} before a command block; there are serves and not run: REASON")
    page.blocks.append(block)


def _add_output(page: Page, fence: Token, language: str) -> None:
    if language not in OUTPUTS or not page.blocks or page.blocks[-1].shows or page.blocks[-1].serves:
        page.complain(fence, "'shows' is for one json or text block behind the command whose output it is")
    else:
        page.blocks[-1] = replace(page.blocks[-1], shows=(language, fence.content))


def _line(token: Token) -> int:
    return token.map[0] + 1 if token.map else 0


# --- links -----------------------------------------------------------------------------------------------------------


def links(path: Path) -> list[tuple[int, str]]:
    """Each link and image of a page with the line of its paragraph."""
    found = []
    for token in _MARKDOWN.parse(path.read_text(encoding="utf-8")):
        for child in token.children or ():
            target = child.attrGet("href") or child.attrGet("src")
            if target is not None:
                found.append((_line(token), str(target)))
    return found


def images_without_alt_text(path: Path) -> list[str]:
    """Images that say nothing to who cannot see them."""
    tokens = _MARKDOWN.parse(path.read_text(encoding="utf-8"))
    images = [child for token in tokens for child in token.children or () if child.type == "image"]
    return [str(image.attrGet("src")) for image in images if not image.content.strip()]


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    tokens = _MARKDOWN.parse(path.read_text(encoding="utf-8"))
    seen: dict[str, int] = {}
    found = set()
    for head, inline in pairwise(tokens):
        if head.type == "heading_open":
            text = "".join(child.content for child in inline.children or ())
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            count = seen.get(slug, 0)
            seen[slug] = count + 1
            found.add(f"{slug}-{count}" if count else slug)
    return found
