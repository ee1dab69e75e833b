/**
 * Notifications that JupyterLab itself does not show: a kernel that restarted without a GPU or not at all, one whose GPU state is unknown, and a
 * budget of which most is spent, once, or all, once more.
 */
import { Notification } from '@jupyterlab/apputils';
import { ServiceManager } from '@jupyterlab/services';

import { GPUState } from './state';

export function showNotices(state: GPUState, services: ServiceManager.IManager): void {
  const broken = new Set<string>();
  const budgets = new Map<string, number>(); // by kernel: 1 it was warned, 2 nothing is left
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
      const spent = kernel.budget ? (kernel.budget_used_up ? 2 : 1) : 0;
      if (spent > (budgets.get(kernel.kernel_id) ?? 0)) {
        Notification.warning(`${name(kernel.kernel_id)}: ${kernel.budget}`, { autoClose: false });
      }
      budgets.set(kernel.kernel_id, spent);
      if (kernel.state !== 'quarantined') {
        broken.delete(kernel.kernel_id);
      } else if (!broken.has(kernel.kernel_id)) {
        broken.add(kernel.kernel_id);
        Notification.error(`${name(kernel.kernel_id)}: ${kernel.sentence}`, { autoClose: false });
      }
    }
  });
}
