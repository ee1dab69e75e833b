/** The server's state of its GPU kernels: one GET at the start, then events. It never polls, and sends no message to a kernel. */
import { URLExt } from '@jupyterlab/coreutils';
import { Event, ServerConnection, ServiceManager } from '@jupyterlab/services';
import { ISignal, Signal } from '@lumino/signaling';

export const STATE = 'urn:jupyter-fractional-gpu:state:v1';
export const NOTICE = 'urn:jupyter-fractional-gpu:notice:v1';
const ROOT = 'jupyter-fractional-gpu';

/** A forecast in milliseconds; four of five outcomes are within the bounds. */
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
  slowdown_brief: string; // which kernels slow its cell down, and by how much; empty: none
  budget: string; // that most or all of one of its budgets is spent; empty: neither
  budget_used_up: boolean;
  goes_away_in_ms: number | null; // until its first device goes away
  lost_because: string; // empty: it is saved before its device goes away
  host_goes_away_in_ms: number | null; // with its memory
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
  goes_away_in_ms: number | null; // 0: its deadline has passed
  leases_saved: number; // before its deadline
  leases_lost: number;
  demand_percent: number; // of all busy kernels together
  holders: string[]; // a line each: this user's kernels and programs by name
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
    // Events sent while this page slept or was disconnected are not repeated.
    const refresh = () => {
      if (document.visibilityState === 'visible') {
        void this.refresh();
      }
    };
    document.addEventListener('visibilitychange', refresh);
    window.addEventListener('online', refresh);
  }

  get changed(): ISignal<this, void> {
    return this._changed;
  }

  get noticed(): ISignal<this, INotice> {
    return this._noticed;
  }

  get now(): IState {
    return this._now;
  }

  kernel(id: string | undefined): IKernel | undefined {
    return this._now.kernels.find(kernel => kernel.kernel_id === id);
  }

  /** The end of the kernel's pin, which counts down without events. */
  pinnedUntil(kernel: IKernel): Date | null {
    return kernel.pinned_ms > 0 ? new Date(this._heardAt + kernel.pinned_ms) : null;
  }

  /** The time of a deadline, which comes closer without events. */
  deadline(leftMs: number | null | undefined): Date | null {
    return leftMs === null || leftMs === undefined ? null : new Date(this._heardAt + leftMs);
  }

  /** Read the state once. A server without our extension has none, which is no error. */
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

  /** Do what `%gpu ACTION` does; returns the broker's sentence. Throws an Error with the sentence of a refusal. */
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

  /** The advice on the kernel's share; empty: none, or it cannot be read now. */
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

  /** Report that the kernel's next cell is near, without anything about the cell. It is lost if the server cannot be reached. */
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
