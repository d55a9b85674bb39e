"""A page taken apart as any browser would."""

from html.parser import HTMLParser


class Reader(HTMLParser):
    """Its elements with their attributes, and its text without styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._is_style = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._is_style = tag == "style"

    def handle_data(self, data: str) -> None:
        self.text += "" if self._is_style else data

    def having(self, name: str) -> list[str]:
        """Each value of an attribute."""
        return [attributes[name] or "" for _, attributes in self.elements if name in attributes]
