/**
 * Notifications that JupyterLab itself does not show: a kernel that restarted without a GPU or not at all, and one whose GPU state is unknown.
 */
import { Notification } from '@jupyterlab/apputils';
import { ServiceManager } from '@jupyterlab/services';

import { GPUState } from './state';

export function showNotices(state: GPUState, services: ServiceManager.IManager): void {
  const broken = new Set<string>();
  const name = (kernelId: string): string => {
    for (const session of services.sessions.running()) {
      if (session.kernel?.id === kernelId) {
        return session.name || session.path;
      }
    }
    return 'A kernel';
  };
  state.noticed.connect((_, notice) => {
    Notification.warning(`${name(notice.kernel_id)}: ${notice.sentence}`, { autoClose: false });
  });
  state.changed.connect(() => {
    for (const kernel of state.now.kernels) {
      if (kernel.state !== 'quarantined') {
        broken.delete(kernel.kernel_id);
      } else if (!broken.has(kernel.kernel_id)) {
        broken.add(kernel.kernel_id);
        Notification.error(`${name(kernel.kernel_id)}: ${kernel.sentence}`, { autoClose: false });
      }
    }
  });
}
