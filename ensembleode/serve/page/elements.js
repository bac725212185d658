// Elements, of HTML and of SVG, and what the paths in these draw.

/** Sets attributes of an element; those that are null it shall not have. */
export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null) element.removeAttribute(name);
    else element.setAttribute(name, value);
  }
}

function filled(element, attributes, children) {
  set(element, attributes);
  element.append(...children);
  return element;
}

export function make(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  return filled(element, attributes, children);
}

/** The line through points `[x, y]`, with a gap where `y` is no finite number. */
export function through(points) {
  let d = "";
  let pen = "M";
  for (const [x, y] of points) {
    const there = Number.isFinite(y);
    if (there) d += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = there ? "L" : "M";
  }
  return d;
}
