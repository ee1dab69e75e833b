/**
 * The GPU of the current notebook's kernel in JupyterLab's status bar.
 */
import { ILabShell, JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ISessionContext } from '@jupyterlab/apputils';
import { ILauncher } from '@jupyterlab/launcher';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';

import { StatusItem } from './item';
import { sortLauncher } from './launcher';
import { sessionOf, showShares } from './names';
import { showNotices } from './notices';
import { tellSigns } from './signs';
import { GPUState } from './state';

/** Show the kernel of the current widget. */
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
  optional: [IStatusBar, ILabShell, ILauncher, ISettingRegistry],
  activate: (
    app: JupyterFrontEnd,
    statusBar: IStatusBar | null,
    shell: ILabShell | null,
    launcher: ILauncher | null,
    settings: ISettingRegistry | null
  ) => {
    const state = new GPUState(app.serviceManager);
    showNotices(state, app.serviceManager);
    if (settings !== null) {
      void settings.load(plugin.id).then(loaded => tellSigns(app.shell, state, loaded));
    }
    if (launcher !== null) {
      sortLauncher(launcher);
    }
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
    void app.restored.then(() => {
      if (shell !== null) {
        showShares(shell, state);
      }
      return state.refresh();
    });
  }
};

export default plugin;
