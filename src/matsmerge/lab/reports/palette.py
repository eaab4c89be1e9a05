"""The colours of pages and figures, by name: on light and on dark.

Series colours are told apart with any kind of colour vision (after Okabe and Ito). Figures name
colours as the page's variables, `var(--ink)`; a picture, which stands alone, has the light ones.
"""

COLOURS = {
    "page": ("#f6f6f3", "#14171a"),
    "surface": ("#ffffff", "#1c2024"),
    "ink": ("#1d2329", "#e7e9ea"),
    "muted": ("#59626b", "#a3acb4"),
    "line": ("#d5d8da", "#3a4147"),
    "grid": ("#eceeee", "#2b3136"),
    "accent": ("#b4460a", "#f59b51"),
    "link": ("#075e9c", "#7cc0f2"),
    "focus": ("#0b6fb8", "#7cc0f2"),
    "warn": ("#fdf1d8", "#3a2f15"),
    "papers": ("#93407a", "#d990c0"),
    "series-1": ("#0a6fb0", "#5badec"),
    "series-2": ("#c07a00", "#f0b13c"),
    "series-3": ("#008a64", "#32bf95"),
    "series-4": ("#c24e00", "#f08a4b"),
    "series-5": ("#a8588f", "#d990c0"),
    "series-6": ("#2f8fc4", "#9ad3f5"),
    "series-7": ("#6b7079", "#a4abb3"),
    "series-8": ("#8a7a00", "#cdbd3f"),
    "worse": ("#e8a965", "#80501a"),
    "better": ("#82b9e3", "#2a6496"),
}
NUM_SERIES = sum(name.startswith("series") for name in COLOURS)
FONT = (
    "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Noto Sans', Arial, sans-serif"
)


def series(index: int) -> str:
    """The name of the colour of one of several."""
    return f"series-{1 + index % NUM_SERIES}"


def variables() -> str:
    """Colours of both themes and the font, for a style sheet."""
    light, dark = (
        "".join(f"--{name}: {both[i]}; " for name, both in COLOURS.items()) for i in (0, 1)
    )
    return f':root {{ --font: {FONT}; {light}}} :root[data-theme="dark"] {{ {dark}}}\n'
