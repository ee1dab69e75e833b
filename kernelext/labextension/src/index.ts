/** The GPU of the current notebook's kernel, in JupyterLab's status bar; for screen readers in Notebook 7, which has no status bar. */
import { ILabShell, JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ISessionContext } from '@jupyterlab/apputils';
import { ILauncher } from '@jupyterlab/launcher';
import { IRunningSessionManagers } from '@jupyterlab/running';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';

import { StatusItem } from './item';
import { sortLauncher } from './launcher';
import { sessionOf, showShares } from './names';
import { showNotices } from './notices';
import { listDevices } from './running';
import { tellSigns } from './signs';
import { Spoken } from './spoken';
import { GPUState } from './state';
import { tellBegun } from './waits';

/** Call `setKernel` with the kernel of the current widget, now and at each change. */
function follow(shell: JupyterFrontEnd.IShell, setKernel: (id: string | undefined) => void): void {
  let session: ISessionContext | undefined;
  const show = () => setKernel(session?.session?.kernel?.id);
  const turn = () => {
    session?.kernelChanged.disconnect(show);
    session = sessionOf(shell.currentWidget);
    session?.kernelChanged.connect(show);
    show();
  };
  shell.currentChanged?.connect(turn);
  turn();
}

/** Announce the state of the current widget's kernel if there is no status bar. */
function say(shell: JupyterFrontEnd.IShell, state: GPUState): void {
  const spoken = new Spoken();
  let kernelId: string | undefined;
  const tell = () => {
    const kernel = state.kernel(kernelId);
    if (kernel !== undefined) {
      spoken.tell(kernel);
    }
  };
  document.body.append(spoken.node);
  state.changed.connect(tell);
  follow(shell, id => {
    kernelId = id;
    tell();
  });
}

const plugin: JupyterFrontEndPlugin<void> = {
  id: 'jupyter-fractional-gpu:status',
  description: "Shows the share, memory and state of the current kernel's GPU.",
  autoStart: true,
  optional: [IStatusBar, ILabShell, ILauncher, ISettingRegistry, IRunningSessionManagers],
  activate: (
    app: JupyterFrontEnd,
    statusBar: IStatusBar | null,
    shell: ILabShell | null,
    launcher: ILauncher | null,
    settings: ISettingRegistry | null,
    running: IRunningSessionManagers | null
  ) => {
    const state = new GPUState(app.serviceManager);
    showNotices(state, app.serviceManager);
    if (settings !== null) {
      void settings.load(plugin.id).then(loaded => {
        tellSigns(app.shell, state, loaded);
        tellBegun(state, app.serviceManager, loaded);
      });
    }
    if (running !== null) {
      listDevices(running, state);
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
      follow(shell, id => item.setKernel(id));
    }
    void app.restored.then(() => {
      if (shell !== null) {
        showShares(shell, state);
      }
      if (statusBar === null || shell === null) {
        say(app.shell, state);
      }
      return state.refresh();
    });
  }
};

export default plugin;
