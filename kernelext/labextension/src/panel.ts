/** The panel over the status item: the facts of `%gpu`, its actions as buttons, and the host's devices. */
import { Widget } from '@lumino/widgets';

import { element } from './dom';
import { GPUState, IDevice } from './state';
import { deadlines, deviceLine, deviceName, facts, hostTitle, possible } from './words';

const PIN_MINUTES = 30;

type Action = 'suspend' | 'resume' | 'pin' | 'unpin';
const ACTIONS: [Action, string, string][] = [
  ['suspend', 'Suspend', "Move this kernel's GPU state to the host's memory now"],
  ['resume', 'Resume', "Bring this kernel's GPU state back now"],
  ['pin', `Keep for ${PIN_MINUTES} min`, `Do not suspend this kernel for ${PIN_MINUTES} minutes`],
  ['unpin', 'Unpin', 'Let this kernel be suspended again when another kernel needs the room']
];

export class Panel extends Widget {
  constructor(state: GPUState, kernelId: string) {
    super();
    this._state = state;
    this._kernelId = kernelId;
    this.addClass('jp-FractionalGPU-panel');
    this.node.setAttribute('role', 'dialog');
    this.node.setAttribute('aria-label', "This kernel's GPU");
    this.node.tabIndex = -1;
    const bar = element('div', { class: 'jp-FractionalGPU-actions' });
    for (const [action, label, title] of ACTIONS) {
      const button = element('button', { type: 'button', class: 'jp-mod-styled', title }, label);
      button.addEventListener('click', () => void this._act(action, label));
      this._buttons.set(action, button);
      bar.append(button);
    }
    this.node.append(this._sentence, this._facts, bar, this._answer, this._title, this._devices);
    state.changed.connect(this._render, this);
    this._render();
    void this._advise();
  }

  dispose(): void {
    this._state.changed.disconnect(this._render, this);
    super.dispose();
  }

  focus(): void {
    this.node.focus();
  }

  private async _act(action: Action, label: string): Promise<void> {
    this._show(`${label}: waiting for the broker`);
    try {
      const sentence = await this._state.act(this._kernelId, action, action === 'pin' ? { minutes: PIN_MINUTES } : {});
      this._show(action === 'pin' || action === 'unpin' ? `${label}: done` : `${label}: done, ${sentence}`);
    } catch (error) {
      this._show(`${label}: ${error instanceof Error ? error.message : String(error)}`);
    }
  }

  /** Read the advice once: it changes only daily. */
  private async _advise(): Promise<void> {
    this._advice = await this._state.advice(this._kernelId);
    if (!this.isDisposed && this._advice) {
      this._render();
    }
  }

  private _show(text: string): void {
    this._answer.textContent = text;
  }

  private _render(): void {
    const kernel = this._state.kernel(this._kernelId);
    if (kernel === undefined) {
      return; // the status item closes this panel
    }
    const can = possible(kernel);
    for (const [action, button] of this._buttons) {
      const focused = document.activeElement === button;
      button.disabled = !can[action];
      if (focused && button.disabled) {
        this.focus(); // a disabled button loses the focus, and the panel would not get Escape
      }
    }
    this._sentence.textContent = kernel.sentence;
    const deadline = deadlines(
      kernel,
      this._state.deadline(kernel.goes_away_in_ms),
      this._state.deadline(kernel.host_goes_away_in_ms)
    );
    const rows = facts(kernel, this._state.pinnedUntil(kernel), deadline, this._advice);
    this._facts.replaceChildren(...rows.flatMap(([name, value]) => [element('dt', {}, name), element('dd', {}, value)]));
    this._title.textContent = hostTitle(this._state.now);
    this._devices.replaceChildren(...this._state.now.devices.map(device => drawn(device, this._state.deadline(device.goes_away_in_ms))));
  }

  private _state: GPUState;
  private _kernelId: string;
  private _advice = '';
  private _buttons = new Map<Action, HTMLButtonElement>();
  private _sentence = element('p', { class: 'jp-FractionalGPU-sentence' });
  private _facts = element('dl');
  private _answer = element('p', { class: 'jp-FractionalGPU-said', role: 'status', 'aria-live': 'polite' });
  private _title = element('h3');
  private _devices = element('ul');
}

function drawn(device: IDevice, goes: Date | null): HTMLElement {
  const text = deviceLine(device, goes);
  const bar = element('div', { class: 'jp-FractionalGPU-bar', 'aria-hidden': 'true' });
  for (const [kind, mib] of [
    ['reserved', device.reserved_mib],
    ['used', device.used_mib]
  ] as const) {
    const part = element('div', { class: `jp-FractionalGPU-${kind}` });
    part.style.width = `${Math.min(100, (100 * mib) / Math.max(1, device.memory_mib))}%`;
    bar.append(part);
  }
  const holders = device.holders.map(holder => element('span', {}, holder));
  return element('li', {}, element('strong', {}, deviceName(device)), element('span', {}, text), bar, ...holders);
}
