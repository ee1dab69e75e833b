/**
 * Notifications: a kernel that restarted without a GPU or not at all, or whose GPU state is unknown; a budget, when most of it is spent and
 * when all is; a GPU or host that goes away, until it has gone or stays.
 */
import { Notification } from '@jupyterlab/apputils';
import { ServiceManager } from '@jupyterlab/services';

import { notebookOf } from './names';
import { GPUState, IKernel } from './state';
import { deadlines, isAtRisk } from './words';

export function showNotices(state: GPUState, services: ServiceManager.IManager): void {
  const broken = new Set<string>();
  const budgets = new Map<string, number>(); // by kernel: 1 most is spent, 2 all
  const going = new Map<string, [fate: string, notification: string]>(); // by kernel
  const showDeadline = (kernel: IKernel): void => {
    const gpuGoes = state.deadline(kernel.goes_away_in_ms);
    const hostGoes = state.deadline(kernel.host_goes_away_in_ms);
    const text = deadlines(kernel, gpuGoes, hostGoes);
    const fate = text ? `${gpuGoes !== null} ${hostGoes !== null} ${kernel.lost_because !== ''}` : '';
    const [before, shown] = going.get(kernel.kernel_id) ?? ['', ''];
    if (fate === before) {
      return;
    }
    if (shown) {
      Notification.dismiss(shown);
    }
    going.delete(kernel.kernel_id);
    if (text) {
      const show = isAtRisk(kernel) ? Notification.error : Notification.warning;
      going.set(kernel.kernel_id, [fate, show(`${name(kernel.kernel_id)}: ${text}`, { autoClose: false })]);
    }
  };
  const name = (kernelId: string): string => notebookOf(kernelId, services);
  state.noticed.connect((_, notice) => {
    Notification.warning(`${name(notice.kernel_id)}: ${notice.sentence}`, { autoClose: false });
  });
  state.changed.connect(() => {
    const here = new Set(state.now.kernels.map(kernel => kernel.kernel_id));
    for (const [kernelId, [, shown]] of going) {
      if (!here.has(kernelId)) {
        Notification.dismiss(shown);
        going.delete(kernelId);
      }
    }
    for (const kernel of state.now.kernels) {
      showDeadline(kernel);
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
