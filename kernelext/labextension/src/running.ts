/** The section of JupyterLab's panel of running kernels that lists the host's devices, and who holds each. */
import { Notification } from '@jupyterlab/apputils';
import { IRunningSessionManagers, IRunningSessions } from '@jupyterlab/running';

import { GPUState } from './state';
import { deviceLine, deviceName, hostTitle } from './words';

export function listDevices(managers: IRunningSessionManagers, state: GPUState): void {
  const item = (text: string, detail = '', children?: IRunningSessions.IRunningItem[]): IRunningSessions.IRunningItem => {
    return { label: () => text, labelTitle: () => `${text} ${detail}`, detail: () => detail, icon: () => '', children };
  };
  managers.add({
    name: 'GPUs',
    running: () =>
      state.now.devices.map(device => {
        const line = deviceLine(device, state.deadline(device.goes_away_in_ms));
        return item(deviceName(device), line, device.holders.map(holder => item(holder)));
      }),
    refreshRunning: () => void state.refresh(),
    runningChanged: state.changed,
    shutdownAllLabel: 'Suspend All',
    shutdownAllConfirmationText: () => `Save all kernels of this server in the host's memory. ${hostTitle(state.now)} stay as they are.`,
    shutdownAll: () => {
      for (const kernel of state.now.kernels.filter(kernel => kernel.state === 'resident')) {
        state.act(kernel.kernel_id, 'suspend').catch((error: Error) => Notification.error(error.message));
      }
    }
  });
}
