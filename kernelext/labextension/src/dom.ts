/** Build an element. Text never becomes markup. */
export function element<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Record<string, string> = {},
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const SVG = 'http://www.w3.org/2000/svg';

/** A disc with the share filled, clockwise from the top. */
export function pie(milli: number): SVGElement {
  const angle = (2 * Math.PI * milli) / 1000;
  const [x, y] = [8 + 6 * Math.sin(angle), 8 - 6 * Math.cos(angle)];
  const svg = document.createElementNS(SVG, 'svg');
  svg.setAttribute('viewBox', '0 0 16 16');
  svg.setAttribute('aria-hidden', 'true');
  svg.classList.add('jp-FractionalGPU-pie');
  const rim = document.createElementNS(SVG, 'circle');
  const slice = document.createElementNS(SVG, milli >= 1000 ? 'circle' : 'path');
  for (const [circle, radius] of [[rim, '7'], ...(milli >= 1000 ? [[slice, '6'] as const] : [])] as const) {
    circle.setAttribute('cx', '8');
    circle.setAttribute('cy', '8');
    circle.setAttribute('r', radius);
  }
  rim.classList.add('jp-FractionalGPU-rim');
  slice.classList.add('jp-FractionalGPU-slice');
  if (milli < 1000) {
    slice.setAttribute('d', `M8 8V2A6 6 0 ${milli > 500 ? 1 : 0} 1 ${x.toFixed(2)} ${y.toFixed(2)}Z`);
  }
  svg.append(rim, slice);
  return svg;
}
