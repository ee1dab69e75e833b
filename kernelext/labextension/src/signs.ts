/**
 * Signs that the user is about to run a cell, so that its kernel can return to the GPU in time.
 *
 * Only the kernel's id and one word are sent: listeners look at an event's kind and place, and read no content of cells. Nothing is sent if
 * the kernel's pool has no foresight, or the page's settings switch this off.
 */
import { JupyterFrontEnd } from '@jupyterlab/application';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { Widget } from '@lumino/widgets';

import { sessionOf } from './names';
import { GPUState } from './state';

const PAUSE_MS = 4000; // between two messages about one kernel ...
const LONG_PAUSE_MS = 30000; // ... and while it is on the GPU already
const PLACES = '.jp-Notebook, .jp-CodeConsole, .jp-NotebookPanel-toolbar, .jp-Toolbar';
const RUNS = '[data-command*="run-cell"], [data-command*="run-and-advance"], [data-jp-item-name="run"]';
const KINDS: [type: string, sign: string][] = [
  ['focusin', 'focus'],
  ['wheel', 'scroll'],
  ['input', 'typing'],
  ['mouseover', 'hover']
];

/** Send signs until the page closes. A sign that comes too soon after another is sent later. */
export function tellSigns(shell: JupyterFrontEnd.IShell, state: GPUState, settings: ISettingRegistry.ISettings): void {
  const toldAt = new Map<string, number>();
  const later = new Map<string, number>(); // timers
  const tell = (id: string | undefined, sign: string) => {
    const kernel = state.kernel(id);
    if (kernel === undefined || settings.composite.foresight === false || !['free', 'displace'].includes(kernel.foresight)) {
      return;
    }
    const pause = kernel.state === 'suspended' ? PAUSE_MS : LONG_PAUSE_MS;
    const left = (toldAt.get(kernel.kernel_id) ?? -Infinity) + pause - Date.now();
    window.clearTimeout(later.get(kernel.kernel_id));
    if (left > 0) {
      later.set(kernel.kernel_id, window.setTimeout(() => tell(id, sign), left));
    } else if (!kernel.busy) {
      toldAt.set(kernel.kernel_id, Date.now());
      void state.expect(kernel.kernel_id, sign);
    }
  };
  state.changed.connect(() => {
    for (const kernel of state.now.kernels.filter(kernel => kernel.busy)) {
      window.clearTimeout(later.get(kernel.kernel_id)); // the cell has started
    }
  });
  const tellOfCurrent = (sign: string) => tell(sessionOf(shell.currentWidget as Widget | null)?.session?.kernel?.id, sign);
  for (const [type, sign] of KINDS) {
    const listener = (event: Event) => {
      const place = event.target instanceof Element ? event.target.closest(sign === 'hover' ? RUNS : PLACES) : null;
      if (place !== null) {
        tellOfCurrent(sign);
      }
    };
    document.addEventListener(type, listener, { capture: true, passive: true });
  }
  document.addEventListener('visibilitychange', () => {
    if (document.visibilityState === 'visible') {
      tellOfCurrent('focus');
    }
  });
  shell.currentChanged?.connect(() => tellOfCurrent('focus'));
}
