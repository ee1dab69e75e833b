/**
 * The GPU of the current notebook's kernel in JupyterLab's status bar.
 */
import { ILabShell, JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ISessionContext } from '@jupyterlab/apputils';
import { IStatusBar } from '@jupyterlab/statusbar';
import { Widget } from '@lumino/widgets';

import { StatusItem } from './item';
import { showNotices } from './notices';
import { GPUState } from './state';

/** A notebook, a console, or anything else with a kernel. */
function sessionOf(widget: Widget | null): ISessionContext | undefined {
  return (widget as { sessionContext?: ISessionContext } | null)?.sessionContext;
}

/** Show the kernel of whatever is in front. */
function follow(shell: ILabShell, item: StatusItem): void {
  let session: ISessionContext | undefined;
  const show = () => item.setKernel(session?.session?.kernel?.id);
  const turn = () => {
    session?.kernelChanged.disconnect(show);
    session = sessionOf(shell.currentWidget);
    session?.kernelChanged.connect(show);
    show();
  };
  shell.currentChanged.connect(turn);
  turn();
}

const plugin: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-fractional-gpu:status',
  description: "Shows the share, memory and state of the current kernel's GPU.",
  autoStart: true,
  optional: [IStatusBar, ILabShell],
  activate: (app: JupyterFrontEnd, statusBar: IStatusBar | null, shell: ILabShell | null) => {
    const state = new GPUState(app.serviceManager);
    showNotices(state, app.serviceManager);
    if (statusBar !== null && shell !== null) {
      const item = new StatusItem(state);
      statusBar.registerStatusItem(plugin.id, {
        item,
        align: 'right',
        rank: 900,
        isActive: () => item.isActive,
        activeStateChanged: item.activeChanged
      });
      follow(shell, item);
    }
    void app.restored.then(() => state.refresh());
  }
};

export default plugin;
