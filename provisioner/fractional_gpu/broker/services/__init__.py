"""The actions of users and administrators on leases and devices, and the status that shows leases and devices."""
