/** What a screen reader says when the state of the current notebook's kernel changes, such as that its cell waits. */
import { element } from './dom';
import { IKernel } from './state';
import { condition } from './words';

export class Spoken {
  /** Must stay in one place of the page: screen readers do not read a new element. */
  readonly node = element('span', { class: 'jp-FractionalGPU-spoken', role: 'status', 'aria-live': 'polite' });

  /** Announce the state if it has changed. */
  tell(kernel: IKernel): void {
    const text = `GPU: ${condition(kernel)}`;
    if (this.node.textContent !== text) {
      this.node.textContent = text;
    }
  }
}
