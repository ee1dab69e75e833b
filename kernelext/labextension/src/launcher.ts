/** Sorts our kernels in the launcher by size. JupyterLab sorts by name: "1 GPU", "1/8 GPU", "3/4 GPU". */
import type { ILauncher } from '@jupyterlab/launcher';
import type { ISignal } from '@lumino/signaling';

import { madeFor } from './names';

/** JupyterLab's own launcher, beyond its interface; other launchers keep their order. */
interface ILauncherModel extends ILauncher {
  items(): IterableIterator<ILauncher.IItemOptions>;
  readonly stateChanged: ISignal<unknown, void>;
}

/** Keep our kernels after the default kernel, grouped by base and pool, the smallest share first. */
export function sortLauncher(launcher: ILauncher): void {
  const model = launcher as ILauncherModel;
  if (typeof model.items !== 'function' || model.stateChanged === undefined) {
    return;
  }
  const sort = () => {
    const ours = [];
    for (const item of model.items()) {
      const made = madeFor(item.metadata?.kernel);
      if (made !== undefined) {
        ours.push({ item, made });
      }
    }
    ours.sort((one, other) => one.made.group.localeCompare(other.made.group) || one.made.milli - other.made.milli);
    ours.forEach(({ item }, index) => {
      item.rank = index + 1; // the default kernel has 0, others have none
    });
  };
  model.stateChanged.connect(sort); // the launcher draws itself a moment later
  sort();
}
