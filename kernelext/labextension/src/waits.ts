/** Tells when a cell that waited long for the GPU begins: in JupyterLab and, if the settings and the browser allow it, on the desktop. */
import { Notification as Toast } from '@jupyterlab/apputils';
import { ServiceManager } from '@jupyterlab/services';
import { ISettingRegistry } from '@jupyterlab/settingregistry';

import { notebookOf } from './names';
import { GPUState, IKernel } from './state';
import { rough } from './words';

const SHOWN_MS = 60000; // on the page; then in JupyterLab's list of notifications

export function tellBegun(state: GPUState, services: ServiceManager.IManager, settings: ISettingRegistry.ISettings): void {
  const since = new Map<string, number>(); // by kernel: when its cell began to wait
  const tell = (kernel: IKernel, waitedMs: number): void => {
    const least = settings.composite.waited as number;
    if (least <= 0 || waitedMs < 1000 * least) {
      return;
    }
    const text = `${notebookOf(kernel.kernel_id, services)}: a cell has begun, after waiting ${rough(waitedMs)} for the GPU.`;
    const never = { label: 'Never show this', callback: () => void settings.set('waited', 0) };
    Toast.info(text, { autoClose: SHOWN_MS, actions: [never] });
    if (settings.composite.desktop && mayNotify('granted')) {
      new Notification('JupyterLab', { body: text, tag: kernel.kernel_id }); // pages of one kernel share it
    }
  };
  state.changed.connect(() => {
    for (const kernel of state.now.kernels) {
      const began = since.get(kernel.kernel_id);
      if (kernel.busy && kernel.reason.startsWith('wait.')) {
        since.set(kernel.kernel_id, began ?? Date.now());
      } else if (kernel.state === 'resident' || !kernel.busy) {
        since.delete(kernel.kernel_id);
        if (began !== undefined && kernel.state === 'resident') {
          tell(kernel, Date.now() - began);
        }
      }
    }
  });
  settings.changed.connect(() => {
    if (settings.composite.desktop && mayNotify('default')) {
      void Notification.requestPermission();
    }
  });
}

/** Whether the browser knows notifications, and the user has answered so; `default`: not yet. */
function mayNotify(answer: NotificationPermission): boolean {
  return 'Notification' in window && Notification.permission === answer;
}
