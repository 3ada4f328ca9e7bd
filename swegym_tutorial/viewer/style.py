"""The look of a page on one attempt, for light and dark notebooks.

No text has a colour of its own: it is the notebook's, on grounds that let the notebook's shine through. What a ground
means stands at the element itself, as JupyterLab drops the rules for a notebook that it doesn't trust yet. Where a
place such as GitHub drops all of it, the page's words and order still say everything.
"""

ROOT = "swegym-episode"

# Okabe and Ito's green, vermilion, blue and orange, which people with any colour vision tell apart.
_GREEN, _RED, _BLUE, _ORANGE = "0,158,115", "213,94,0", "86,180,233", "230,159,0"
PLUS, MINUS = f"background-color:rgba({_GREEN},.2)", f"background-color:rgba({_RED},.18)"
GOOD, BAD, NEITHER = PLUS, MINUS, "background-color:rgba(128,128,128,.15)"
SHADES = [
    "",
    *(f"background-color:rgba({_ORANGE},{alpha})" for alpha in (0.13, 0.26, 0.39, 0.52)),
]  # likely to unlikely
SAMPLED = f"border-left:4px solid rgb({_BLUE});padding-left:8px"
_RULES = {
    "": "line-height:1.45;max-width:60em;padding-top:.5em",
    "h4": "margin:0 0 .2em;font-size:1.15em;font-weight:600",
    "h5": "margin:1em 0 .3em;font-size:1em;font-weight:600",
    ".facts": "margin:0 0 .4em;opacity:.8;font-size:.93em",
    ".pill": "display:inline-block;padding:0 .6em;border-radius:1em;font-size:.85em;font-weight:600;"
    "border:1px solid rgba(128,128,128,.6);margin-left:.4em;vertical-align:.1em",
    ".good": f"border-color:rgba({_GREEN},.9)",
    ".bad": f"border-color:rgba({_RED},.9)",
    ".note": f"margin:.4em 0;padding:.25em .7em;border-left:3px solid rgb({_ORANGE});background:rgba({_ORANGE},.14)",
    "pre": "font-family:var(--jp-code-font-family,monospace);margin:0;padding:.35em .7em;border-radius:3px;white-space:pre-wrap;overflow-wrap:anywhere;"
    "background:rgba(128,128,128,.1);color:inherit;font-size:.92em;line-height:1.4;text-align:left;border:0",
    "pre.prose": "font-family:inherit;font-size:1em;background:none;padding:.1em 0",
    "pre.thought": f"font-family:inherit;font-size:1em;font-style:italic;background:none;"
    f"border-left:3px solid rgba({_BLUE},.8);border-radius:0;padding:.1em .7em",
    "pre.command": f"background:rgba({_BLUE},.16)",
    ".row": "display:grid;grid-template-columns:7.5em minmax(0,1fr);column-gap:.8em;margin:.3em 0",
    ".row>:first-child": "font-size:.86em;opacity:.85;padding-top:.25em;text-align:right",
    ".row>.wrong": "font-weight:700;opacity:1",
    ".turn": "border-top:1px solid rgba(128,128,128,.3);padding:.5em 0 .35em",
    ".turn>b": "font-weight:600",
    "small": "opacity:.8;font-size:.86em;font-weight:400",
    "summary": "cursor:pointer;padding:.1em 0;font-size:.93em",
    "summary b": "font-size:1.075em;font-weight:600;margin-right:.2em",
    "details.part": "margin:1em 0 0",
    "details.part>:not(summary)": "margin-top:.35em",
    ".line": "display:block;padding:0 .4em;margin:0 -.4em",
    ".line.plus": f"box-shadow:inset 3px 0 rgb({_GREEN})",
    ".line.minus": f"box-shadow:inset 3px 0 rgb({_RED})",
    ".line.hunk": "opacity:.7",
    ".line.file": "font-weight:700",
    "table": "border-collapse:collapse;margin:.2em 0;width:auto;font-size:.92em;table-layout:auto",
    "th,td": "text-align:left;padding:.15em .8em .15em .3em;white-space:normal;vertical-align:top;max-width:none",
    "td code": "background:none;overflow-wrap:anywhere;padding:0",
    ".given": "background:rgba(128,128,128,.1)",
    ".sampled": f"background:none;border:1px solid rgba({_BLUE},.9);border-left-width:4px;line-height:1.75",
    ".sampled *": "box-shadow:inset -1px 0 rgba(128,128,128,.45);border-radius:2px;padding:.1em 0",
    ".sampled b,.key b": "font-weight:inherit;text-decoration:underline;text-underline-offset:.2em",
    ".key": "font-size:.9em;margin:.3em 0",
    ".key>span": "padding:.05em .5em;border-radius:3px;margin-right:.3em;white-space:nowrap;display:inline-block;border:1px solid rgba(128,128,128,.3)",
    ".key .sampled": f"line-height:inherit;border-color:rgba({_BLUE},.9);border-left-width:4px",
}


def style() -> str:
    """Return the rules as an HTML element; each holds for one page's parts only."""
    rules = (f"{_within(selector)}{{{rule}}}" for selector, rule in _RULES.items())
    return f"<style>{''.join(rules)}</style>"


def _within(selector: str) -> str:
    root = f".{ROOT}.{ROOT}"  # twice, to prevail over a notebook's own rules
    return ",".join(f"{root} {part}".rstrip() for part in selector.split(","))
