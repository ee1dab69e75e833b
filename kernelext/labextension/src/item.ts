/** The item in the status bar: the current kernel's share, memory, state and place in the queue. */
import { Popup, showPopup } from '@jupyterlab/statusbar';
import { ISignal, Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';

import { element, pie } from './dom';
import { Panel } from './panel';
import { Spoken } from './spoken';
import { GPUState, IKernel } from './state';
import { deadlines, line, mood } from './words';

export class StatusItem extends Widget {
  constructor(state: GPUState) {
    super();
    this._state = state;
    this.addClass('jp-FractionalGPU-item');
    this._button.addEventListener('click', () => this.toggle());
    this.node.append(this._button, this._spoken.node);
    state.changed.connect(() => this._render());
  }

  get activeChanged(): ISignal<this, void> {
    return this._activeChanged;
  }

  get isActive(): boolean {
    return this._kernel !== undefined;
  }

  setKernel(id: string | undefined): void {
    if (id !== this._kernelId) {
      this._kernelId = id;
      this._popup?.dispose();
      this._render();
    }
  }

  toggle(): void {
    if (this._popup !== null) {
      this._popup.dispose();
      return;
    }
    if (this._kernelId === undefined) {
      return;
    }
    const panel = new Panel(this._state, this._kernelId);
    const popup = showPopup({ body: panel, anchor: this, align: 'right', hasDynamicSize: true });
    this._popup = popup;
    this._button.setAttribute('aria-expanded', 'true');
    popup.disposed.connect(() => {
      this._popup = null;
      this._button.setAttribute('aria-expanded', 'false');
      if (panel.node.contains(document.activeElement)) {
        this._button.focus(); // unless a click has moved the focus
      }
    });
    panel.focus();
  }

  private _render(): void {
    const kernel = this._state.kernel(this._kernelId);
    const appears = (kernel === undefined) !== (this._kernel === undefined);
    this._kernel = kernel;
    if (kernel !== undefined) {
      const gpuGoes = this._state.deadline(kernel.goes_away_in_ms);
      const hostGoes = this._state.deadline(kernel.host_goes_away_in_ms);
      this._button.replaceChildren(pie(kernel.fraction_milli), element('span', {}, line(kernel, gpuGoes, hostGoes)));
      this._button.title = deadlines(kernel, gpuGoes, hostGoes) || kernel.sentence;
      this.node.dataset.mood = mood(kernel);
      this._spoken.tell(kernel);
    }
    if (kernel === undefined) {
      this._popup?.dispose(); // without its item it would be hidden, and could not be closed
    }
    if (appears) {
      this._activeChanged.emit();
    }
  }

  private _state: GPUState;
  private _kernelId: string | undefined = undefined;
  private _kernel: IKernel | undefined = undefined;
  private _popup: Popup | null = null;
  private _button = element('button', {
    type: 'button',
    class: 'jp-FractionalGPU-button',
    'aria-haspopup': 'dialog',
    'aria-expanded': 'false'
  });
  private _spoken = new Spoken();
  private _activeChanged = new Signal<this, void>(this);
}
