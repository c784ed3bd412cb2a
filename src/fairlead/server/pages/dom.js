// Helpers for the page's elements. Text is always set as text, so a name from a client never becomes markup.

export const $ = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// This and the functions below change the page only if the content differs.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Characters at the end of a long name that are always shown.
const END = 12;

// Sets a name, or several with what separates them. One of more than `fits` characters is cut in the middle, because names
// of pods differ at their ends. The style sheet shrinks the middle to nothing. So screen readers, searches and copies have
// the name in one piece.
export function setName(element, names, fits = 32) {
  const parts = [names].flat();
  if (element.textContent === parts.join("")) return;
  element.replaceChildren(make("span", {}, ...parts.flatMap((name) => {
    const signs = [...name];
    const end = signs.splice(signs.length > fits ? -END : 0).join("");
    const middle = signs.splice(fits - END).join("");
    return [signs.join(""), ...(middle ? [make("span", { class: "cut" }, middle)] : []), end];
  })));
}

export function setClass(element, name) {
  if (element.className !== name) element.className = name;
}

export function setHidden(element, hidden) {
  if (element.hidden !== hidden) element.hidden = hidden;
}

export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}
