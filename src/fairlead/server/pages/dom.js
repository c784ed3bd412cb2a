// Helpers for the page's elements. Text is always set as text: no name from a client becomes markup.

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

// Changes the page only where the content has changed.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Signs of a long name: those that always show, at its end, and how many fit in any case.
const END = 12;
const FITS = 24;

// A name that is cut in the middle where it is too long: names of pods differ at their ends.
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
