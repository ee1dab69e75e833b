/** Tells when a cell that waited long for the GPU begins, if the settings allow it. */
import { Notification } from '@jupyterlab/apputils';
import { ServiceManager } from '@jupyterlab/services';
import { ISettingRegistry } from '@jupyterlab/settingregistry';

import { notebookOf } from './names';
import { GPUState } from './state';
import { rough } from './words';

const LEAST_MS = 30000; // of a wait
const SHOWN_MS = 60000; // on the page; then in JupyterLab's list of notifications

export function tellBegun(state: GPUState, services: ServiceManager.IManager, settings: ISettingRegistry.ISettings): void {
  const since = new Map<string, number>(); // by kernel: when its cell began to wait
  const never = { label: 'Never show this', callback: () => void settings.set('waited', false) };
  state.changed.connect(() => {
    for (const kernel of state.now.kernels) {
      const began = since.get(kernel.kernel_id) ?? Date.now();
      if (kernel.busy && kernel.reason.startsWith('wait.')) {
        since.set(kernel.kernel_id, began);
      } else if (kernel.state === 'resident' || !kernel.busy) {
        since.delete(kernel.kernel_id);
        const waitedMs = Date.now() - began;
        if (kernel.state === 'resident' && waitedMs >= LEAST_MS && settings.composite.waited) {
          const text = `${notebookOf(kernel.kernel_id, services)}: a cell has begun, after waiting ${rough(waitedMs)} for the GPU.`;
          Notification.info(text, { autoClose: SHOWN_MS, actions: [never] });
        }
      }
    }
  });
}
