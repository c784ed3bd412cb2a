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

// Characters at the end of a long name that are always shown; characters up to which a name is not long.
const END = 12;
const FITS = 24;

// Sets a name. One that does not fit is cut in the middle, because names of pods differ at their ends.
export function setName(element, text) {
  if (element.textContent === text) return;
  const signs = [...text];
  const start = signs.length > FITS ? signs.splice(0, signs.length - END).join("") : "";
  element.replaceChildren(make("span", {}, ...(start ? [make("span", { class: "cut" }, start)] : []), signs.join("")));
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
