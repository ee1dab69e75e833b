/** Shows the current share in a kernel's name: after a resize, JupyterLab still shows the share of its kernelspec. */
import { ILabShell } from '@jupyterlab/application';
import { ISessionContext } from '@jupyterlab/apputils';
import { ServiceManager } from '@jupyterlab/services';
import { Widget } from '@lumino/widgets';

import { GPUState } from './state';
import { share } from './words';

const MADE_BY = 'jupyter-fractional-gpu';
const STATUS_BAR = 'jp-main-statusbar';

/** The share of our kernelspec. `group` is equal for kernelspecs that differ only in their share. */
export interface IMade {
  milli: number;
  group: string;
}

/** Read the metadata of a kernelspec; undefined if it is not ours. */
export function madeFor(metadata: unknown): IMade | undefined {
  const mark = (metadata as Record<string, unknown> | undefined)?.[MADE_BY] as Record<string, unknown> | undefined;
  return typeof mark?.fraction_milli === 'number'
    ? { milli: mark.fraction_milli, group: JSON.stringify([mark.pool, mark.base, mark.launcher]) }
    : undefined;
}

export function sessionOf(widget: Widget | null): ISessionContext | undefined {
  return (widget as { sessionContext?: ISessionContext } | null)?.sessionContext;
}

/** The name of the kernel's notebook, for people. */
export function notebookOf(kernelId: string, services: ServiceManager.IManager): string {
  for (const session of services.sessions.running()) {
    if (session.kernel?.id === kernelId) {
      return session.name || session.path;
    }
  }
  return 'A kernel';
}

/** Show the current share in the names of kernels, until the page closes. */
export function showShares(shell: ILabShell, state: GPUState): void {
  const apply = () => {
    for (const widget of shell.widgets('main')) {
      const session = sessionOf(widget);
      const name = session && presentName(session, state);
      if (name !== undefined) {
        for (const place of placesOf(widget, shell)) {
          relabel(place, name);
          redrawn.observe(place, { subtree: true, childList: true, characterData: true }); // a second call changes nothing
        }
      }
    }
  };
  const redrawn = new MutationObserver(apply); // JupyterLab draws a name with the kernelspec's share
  state.changed.connect(apply);
  shell.currentChanged.connect(apply);
  shell.layoutModified.connect(apply);
}

function placesOf(widget: Widget, shell: ILabShell): Element[] {
  const toolbar = (widget as { toolbar?: Widget }).toolbar;
  const places = [...(toolbar?.node.querySelectorAll('.jp-KernelName') ?? [])];
  const bar = widget === shell.currentWidget ? document.getElementById(STATUS_BAR) : null;
  return bar === null ? places : [...places, bar];
}

type Name = [pattern: RegExp, present: string];

/** The pattern of the kernel's name with any share, and its replacement. */
function presentName(session: ISessionContext, state: GPUState): Name | undefined {
  const running = session.session?.kernel;
  const spec = running && session.specsManager.specs?.kernelspecs[running.name];
  const kernel = state.kernel(running?.id);
  const made = madeFor(spec?.metadata);
  if (!spec || kernel === undefined || made === undefined) {
    return undefined;
  }
  const [before, after, ...more] = spec.display_name.split(`${share(made.milli)} GPU`);
  if (before === undefined || after === undefined || more.length > 0) {
    return undefined; // the user chose this name
  }
  const pattern = new RegExp(`${literally(before)}[0-9./]+ GPU${literally(after)}`);
  return [pattern, `${before}${share(kernel.fraction_milli)} GPU${after}`];
}

function literally(text: string): string {
  return text.replace(/[.*+?^${}()|[\]\\]/g, '\\$&');
}

function relabel(root: Element, [pattern, present]: Name): void {
  const texts = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode;
    const shown = text.nodeValue ?? '';
    const wanted = shown.replace(pattern, () => present);
    if (wanted !== shown) {
      text.nodeValue = wanted;
    }
  }
}
