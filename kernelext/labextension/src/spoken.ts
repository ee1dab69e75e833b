/**
 * What a screen reader says when the state of the current notebook's kernel changes, above all that its cell waits.
 */
import { element } from './dom';
import { IKernel } from './state';
import { condition } from './words';

export class Spoken {
  /** For a place in the page that does not move: a new element is not read. */
  readonly node = element('span', { class: 'jp-FractionalGPU-spoken', role: 'status', 'aria-live': 'polite' });

  /** Say the state, unless it is the one that was said last. */
  tell(kernel: IKernel): void {
    const text = `GPU: ${condition(kernel)}`;
    if (this.node.textContent !== text) {
      this.node.textContent = text;
    }
  }
}
