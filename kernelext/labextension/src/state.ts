/**
 * The server's state of its GPU kernels: one GET at the start, then its events. Nothing here polls, and no message goes to a kernel.
 */
import { URLExt } from '@jupyterlab/coreutils';
import { Event, ServerConnection, ServiceManager } from '@jupyterlab/services';
import { ISignal, Signal } from '@lumino/signaling';

export const STATE = 'urn:jupyter-fractional-gpu:state:v1';
export const NOTICE = 'urn:jupyter-fractional-gpu:notice:v1';
const ROOT = 'jupyter-fractional-gpu';

/** A forecast in milliseconds, with the bounds of four outcomes of five. */
export interface ISpan {
  expected_ms: number;
  low_ms: number;
  high_ms: number;
}

/** A kernel with a GPU lease. Memory in MiB, shares in thousandths of a GPU, durations in milliseconds. */
export interface IKernel {
  kernel_id: string;
  state: string;
  pool: string;
  fraction_milli: number;
  reserve_mib: number;
  used_mib: number;
  measured: boolean; // since its last cell began or ended
  saved_mib: number;
  device_name: string;
  simulated: boolean;
  busy: boolean;
  reason: string;
  sentence: string;
  position: number | null;
  expected: ISpan | null;
  resume: ISpan | null;
  pinned_ms: number;
  /** Who slows its cell down, and by how much; empty: nobody. */
  slowdown_brief: string;
  /** That most of a budget that it counts for is spent, or all of it; empty: neither. */
  budget: string;
  budget_used_up: boolean;
  /** The first of its devices goes away in so long; null: none does. Without a reason why it is lost, it is saved before. */
  goes_away_in_ms: number | null;
  lost_because: string;
  /** The host goes away in so long, with its memory; null: it does not. */
  host_goes_away_in_ms: number | null;
  foresight: string; // what its pool does for an expected cell: off, free, displace
}

/** A device of the host. Memory in MiB. */
export interface IDevice {
  index: number;
  name: string;
  pool: string;
  memory_mib: number;
  used_mib: number;
  reserved_mib: number;
  over_committed: boolean;
  lost: boolean;
  draining: boolean;
  /** While it is drained by a deadline; 0: that has passed. And how many kernels on it will be saved before, and cannot be. */
  goes_away_in_ms: number | null;
  leases_saved: number;
  leases_lost: number;
  /** What the kernels that are busy on it need of it together. */
  demand_percent: number;
}

export interface IState {
  broker: boolean;
  simulated: boolean;
  kernels: IKernel[];
  devices: IDevice[];
}

export interface INotice {
  kernel_id: string;
  sentence: string;
}

const NOTHING: IState = { broker: false, simulated: false, kernels: [], devices: [] };

export class GPUState {
  constructor(services: ServiceManager.IManager) {
    this._settings = services.serverSettings;
    services.events.stream.connect((_, event) => this._take(event));
    // Events that were sent while this page slept or was disconnected are not repeated.
    const refresh = () => {
      if (document.visibilityState === 'visible') {
        void this.refresh();
      }
    };
    document.addEventListener('visibilitychange', refresh);
    window.addEventListener('online', refresh);
  }

  /** Emitted after each change. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  /** Emitted for notices that nothing else in JupyterLab shows. */
  get noticed(): ISignal<this, INotice> {
    return this._noticed;
  }

  get now(): IState {
    return this._now;
  }

  kernel(id: string | undefined): IKernel | undefined {
    return this._now.kernels.find(kernel => kernel.kernel_id === id);
  }

  /** Until when the kernel is pinned: the rest of a pin counts down without events. */
  pinnedUntil(kernel: IKernel): Date | null {
    return kernel.pinned_ms > 0 ? new Date(this._heardAt + kernel.pinned_ms) : null;
  }

  /** When something goes away, by what was heard last: a deadline comes closer without events. */
  deadline(leftMs: number | null | undefined): Date | null {
    return leftMs === null || leftMs === undefined ? null : new Date(this._heardAt + leftMs);
  }

  /** Read the state once. A server without our extension has none, and that is no error. */
  async refresh(): Promise<void> {
    const events = this._events;
    const url = URLExt.join(this._settings.baseUrl, ROOT, 'state') + '?no_track_activity=1';
    try {
      const response = await ServerConnection.makeRequest(url, {}, this._settings);
      if (response.ok && events === this._events) {
        this._set((await response.json()) as IState);
      }
    } catch (error) {
      if (!(error instanceof ServerConnection.NetworkError)) {
        throw error;
      }
    }
  }

  /** Carry an action out, as `%gpu ACTION` does; returns the broker's sentence. Throws an Error with the sentence of a refusal. */
  async act(kernelId: string, action: string, body: Record<string, number> = {}): Promise<string> {
    const url = URLExt.join(this._settings.baseUrl, ROOT, 'kernels', encodeURIComponent(kernelId), action);
    const init = { method: 'POST', body: JSON.stringify(body) };
    const response = await ServerConnection.makeRequest(url, init, this._settings);
    const answer = (await response.json()) as { message?: string; sentence?: string };
    if (!response.ok) {
      throw new Error(answer.message ?? `the server answered ${response.status}`);
    }
    return answer.sentence ?? '';
  }

  /** What is suggested about the kernel's share, with its figures and its risk; empty: nothing, or it cannot be learnt now. */
  async advice(kernelId: string): Promise<string> {
    const path = URLExt.join(this._settings.baseUrl, ROOT, 'kernels', encodeURIComponent(kernelId), 'advice');
    try {
      const response = await ServerConnection.makeRequest(path + '?no_track_activity=1', {}, this._settings);
      return response.ok ? ((await response.json()) as { sentence: string }).sentence : '';
    } catch (error) {
      if (!(error instanceof ServerConnection.NetworkError)) {
        throw error;
      }
      return '';
    }
  }

  /** Tell a sign that the kernel's next cell is near; nothing of the cell is told. A server that cannot take it loses nothing. */
  async expect(kernelId: string, sign: string): Promise<void> {
    const path = URLExt.join(this._settings.baseUrl, ROOT, 'kernels', encodeURIComponent(kernelId), 'expect');
    const init = { method: 'POST', body: JSON.stringify({ sign }) };
    try {
      await ServerConnection.makeRequest(path + '?no_track_activity=1', init, this._settings);
    } catch (error) {
      if (!(error instanceof ServerConnection.NetworkError)) {
        throw error;
      }
    }
  }

  private _take(event: Event.Emission): void {
    if (event.schema_id === STATE) {
      this._events += 1;
      this._set(event as unknown as IState);
    } else if (event.schema_id === NOTICE) {
      this._noticed.emit(event as unknown as INotice);
    }
  }

  private _set(state: IState): void {
    this._now = state;
    this._heardAt = Date.now();
    this._changed.emit();
  }

  private _settings: ServerConnection.ISettings;
  private _now: IState = NOTHING;
  private _heardAt = 0;
  private _events = 0;
  private _changed = new Signal<this, void>(this);
  private _noticed = new Signal<this, INotice>(this);
}
